"""What a user adds to a recipe, a cluster and a strategy: words of each subject, drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dslaunch.conffiles import names
from dslaunch.engines.registry import ENGINES

Words = list[str]

MODELS = names("model")
DECODERS = ("llama3_1_8b", "llama2_13b", "qwen2_5_7b", "qwen3_8b", "mistral_7b", "gemma2_9b", "gpt2_xl")
"""Language models of several families."""
OWN_PROGRAM = ("megatron", "megatron_deepspeed", "megatron_mimo")
"""Engines that run a pretrain script of their framework's."""


@dataclass(frozen=True)
class Given:
    """What was drawn so far, and what the next words depend on."""

    dice: random.Random
    recipe: str
    world: int
    node: int
    """GPUs of a node."""
    strategy: str
    engine: str
    components: dict[str, Any]
    training: dict[str, Any]
    careless: bool

    def chance(self, share: float) -> bool:
        return self.dice.random() < share

    def one(self, *values: object) -> Any:
        return self.dice.choice(values)

    @property
    def trunk(self) -> str:
        """The largest component's name, by what most recipes call it."""
        return "llm" if "llm" in self.components else next(iter(self.components))


def program(given: Given) -> Words:
    """What the engine runs."""
    framework = ["engine.path=/opt/framework", "data.path=/data/text", "data.tokenizer=/models/tokenizer"]
    if given.engine in OWN_PROGRAM:
        return [word for word in framework if given.chance(0.98)]
    if given.engine == "native" or (given.recipe == "vla_tiny" and given.chance(0.5)):
        return ["module=dslaunch.runtime"]
    words = [] if given.chance(0.02) else ["script=train.py"]
    if given.recipe == "vla_tiny" and words:
        words.append("module=")
    return [*words, *(framework if given.engine == "auto" and given.chance(0.7) else [])]


def _version(given: Given) -> Words:
    if given.engine == "auto" or given.chance(0.6):
        return []
    return [f"engine.version={given.dice.choice(ENGINES[given.engine].versions)}"]


def _batch(given: Given) -> Words:
    """A batch that the ranks share evenly, in most cases."""
    words: Words = []
    micro = given.one(1, 1, 1, 1, 2, 4)
    if given.chance(0.8):
        words.append(f"training.micro_batch={micro}")
    if given.chance(0.9):
        passes = 1 if given.strategy == "zenflow" and not given.careless else given.one(1, 1, 2, 4, 8, 16, 3)
        words.append(f"training.global_batch={given.world * micro * passes}")
    elif given.careless:
        words.append(f"training.global_batch={given.one(1, 7, 100, 256, 1000, 1024, 4096)}")
    if given.careless and given.chance(0.1):
        words.append(f"training.num_microbatches={given.one(1, 2, 4)}")
    if given.chance(0.02):
        words.append(f"training.macro_batches={given.one(2, 4)}")
    return words


def _sequence(given: Given) -> Words:
    """Longer ones carelessly: an encoder's tokens must fit in, and the GPU's memory must hold it."""
    if given.chance(0.6) or (given.recipe == "vla_tiny" and not given.careless):
        return []
    lengths = (
        (512, 2048, 8192, 16384, 32768, 131072, 1000) if given.careless else (2048, 2048, 4096, 4096, 8192)
    )
    return [f"training.seq_len={given.dice.choice(lengths)}"]


def _numbers(given: Given) -> Words:
    """Precision and what else a step is made of."""
    words: Words = []
    if given.chance(0.2):
        words.append(f"training.precision={given.one('bf16', 'fp16', 'fp32')}")
    if given.chance(0.06):
        words.append(f"training.grad_accum_dtype={given.one('bf16', 'fp32', 'fp32', 'fp16')}")
    if given.chance(0.2):
        words.append(f"training.clip={given.one(0, 0.5, 1, 1.0, 5)}")
    if given.chance(0.2 if given.careless else 0.02):
        words.append(
            f"training.schedule={given.one('1f1b', '1f1b', 'gpipe', 'interleaved', 'zb-h1', 'zb-v')}"
        )
    if given.chance(0.1):
        words.append(f"training.overlap_comm={given.one('true', 'false')}")
    if given.chance(0.1):
        words.append(f"training.sequence_parallel={given.one('true', 'false')}")
    if given.chance(0.05):
        words.append(f"training.seed={given.one(0, 1, 42, 4294967295)}")
    return words


def _optimizer(given: Given) -> Words:
    words: Words = []
    if given.chance(0.5):
        return words
    prefix, steps = "training.optimizer.", int(given.training["steps"])
    if given.chance(0.5):
        steps = given.one(1, 2, 10, 1000, 1000, 100000)
        words.append(f"training.steps={steps}")
        words.append(f"{prefix}warmup_steps={given.one(0, 0, steps // 10, steps // 2, steps)}")
    if given.chance(0.5):
        words.append(f"{prefix}lr={given.one('1e-5', '3e-4', '0.001', '2.0e-5', '1')}")
        words.append(f"{prefix}min_lr={given.one('0', '1e-6', '1e-5')}")
    if given.chance(0.6):
        late = given.engine not in ("deepspeed", "auto") or given.careless
        schedule = given.dice.choice(["constant", "linear", "cosine", *(["wsd"] if late else [])])
        words.append(f"{prefix}schedule={schedule}")
        if schedule == "wsd" and given.chance(0.95):
            words.append(f"{prefix}decay_steps={max(1, steps // 4)}")
            words += [] if given.careless else [f"{prefix}warmup_steps={steps // 4}"]
            if given.chance(0.6):
                words.append(f"{prefix}decay_shape={given.one('linear', 'cosine', 'sqrt')}")
    if given.chance(0.2):
        words.append(f"{prefix}betas=[{given.one('0.9,0.95', '0.9,0.999', '0,0', '0.9,0.99')}]")
    if given.chance(0.2):
        words.append(f"{prefix}weight_decay={given.one('0', '0.1', '0.01')}")
    if given.chance(0.1):
        words.append(f"{prefix}eps={given.one('1e-8', '1e-6', '1e-15')}")
    return words


def _trained(given: Given) -> Words:
    """Frozen parts and adapters."""
    words: Words = []
    for name, component in given.components.items():
        if given.chance(0.85) or (name == given.trunk and not given.careless):
            continue
        key = f"model.components.{name}."
        how = given.one("nothing", "nothing", "lora", "lora", "qlora", "layers", "all")
        words.append(f"{key}train={how}")
        if how in ("lora", "qlora"):
            words.append(f"{key}lora.rank={given.one(1, 8, 16, 64)}")
        elif component.get("lora") and not given.careless:
            words += [f"{key}lora=null", f"{key}train_ends=[]"]
        if how == "layers":
            words.append(f"{key}train_layers=[{given.one('-1', '0', '-2,-1', '0,1')}]")
        if given.chance(0.2):
            words.append(f"{key}lr={given.one('1e-5', '1e-4')}")
    return words


def _layout(given: Given) -> Words:
    """Degrees of single components, or of each."""
    if given.chance(0.5):
        return []
    if not given.careless:
        return _careful_layout(given)
    where = given.one("every", given.trunk, given.trunk, given.dice.choice(list(given.components)))
    degrees: dict[str, tuple[object, ...]] = {
        "tp": (1, 2, 4, 8, 3, 16), "pp": (1, 2, 4, 8, 5), "vpp": (1, 2, 4), "cp": (1, 2, 4),
        "ep": (1, 2, 4, 8), "etp": (1, 2), "dp": (1, 2, 4, 8), "zero": (0, 1, 1, 2, 3),
        "offload": ("none", "cpu", "cpu", "cpu_params", "nvme", "nvme_params"),
        "recompute": ("none", "selective", "full"), "micro_batch": (1, 2, 4),
    }  # fmt: skip
    likely = {"vpp": 0.1, "etp": 0.1, "dp": 0.05, "micro_batch": 0.1, "ep": 0.15, "cp": 0.2, "offload": 0.15}
    return [
        f"strategy.{where}.{key}={given.dice.choice(values)}"
        for key, values in degrees.items()
        if given.chance(likely.get(key, 0.3))
    ]


def _careful_layout(given: Given) -> Words:
    """What the strategy leaves open."""
    words: Words = []
    where = given.one("every", given.trunk)
    if given.chance(0.5):
        words.append(f"strategy.{where}.recompute={given.one('none', 'selective', 'full', 'full')}")
    if given.strategy not in ("auto", "", "layouts"):
        return words
    sizes = [size for size in (1, 2, 4, 8) if size <= min(given.node, given.world)]
    if given.chance(0.6):
        words.append(f"strategy.{given.trunk}.tp={given.dice.choice(sizes)}")
    if given.chance(0.4) and len(given.components) == 1:
        words.append(f"strategy.{given.trunk}.pp={given.one(1, 2, 4)}")
        words += [f"strategy.{given.trunk}.vpp={given.one(1, 2)}"] if given.chance(0.2) else []
    if given.chance(0.15) and given.engine == "megatron":
        words.append(f"strategy.{given.trunk}.cp={given.one(1, 2)}")
    if given.chance(0.6) and given.components[given.trunk].get("experts"):
        words.append(f"strategy.{given.trunk}.ep={given.one(1, 2, 4, 8)}")
        words += [f"strategy.{given.trunk}.etp=1"] if given.chance(0.3) else []
    return words


MODES: dict[str, dict[str, tuple[object, ...]]] = {
    "strategy=zero3_hpz": {"strategy.zero_plus_plus.hpz": ("node", 8, 4, 3)},
    "strategy=zero3_plus_plus": {"strategy.zero_plus_plus.quantized_weights": ("false",)},
    "strategy=zenflow": {
        "strategy.zenflow.topk_ratio": (0.05, 0.99), "strategy.zenflow.update_interval": (1, 8),
        "strategy.zenflow.select_interval": (8, 32), "strategy.zenflow.overlap_step": ("false",),
        "strategy.every.zero": (1, 3), "strategy.zenflow.warmup_steps": (10,),
    },
    "strategy=super_offload": {"strategy.super_offload.cpu_cores": (0.5, 0.95)},
    "strategy=autotp": {"strategy.every.zero": (0, 2, 3), "strategy.every.tp": (2, 4)},
    "strategy=ulysses": {
        "strategy.every.zero": (1, 2), "strategy.every.cp": (2, 4), "strategy.every.offload": ("cpu",),
    },
    "strategy=zero3_nvme_offload": {
        "strategy.every.offload": ("nvme",), "strategy.nvme.block_size": (8388608,), "strategy.nvme.threads": (2,),
        "strategy.nvme.queue_depth": (16,), "cluster.node.nvme_gib": (8000,),
    },
    "strategy=ddp": {
        "strategy.ddp.bucket_cap_mb": (1, 100), "strategy.ddp.find_unused_parameters": ("true",),
        "strategy.ddp.static_graph": ("true",), "strategy.ddp.comm_hook": ("bf16", "fp16", "power_sgd"),
        "strategy.ddp.gradient_as_bucket_view": ("true",), "strategy.ddp.sync_batchnorm": ("true",),
    },
    "strategy=hsdp": {"strategy.shard": (2, 4, 8, 16, 5)},
    "engine=deepspeed": {
        "engine.huggingface": ("true",), "engine.activation_checkpointing.enabled": ("true",),
        "engine.activation_checkpointing": ("{enabled: true, cpu: true}", "{enabled: true, profile: true}"),
        "engine.monitor.csv.enabled": ("true",), "engine.activation_checkpointing.cpu": ("true",),
        "engine.monitor.tensorboard.enabled": ("true",), "engine.monitor.wandb.enabled": ("true",),
        "engine.extra.wall_clock_breakdown": ("true",), "engine.extra.steps_per_print": (1, 10, "many"),
        "engine.extra.zero_optimization.reduce_bucket_size": (500000000,), "checkpoint.universal": ("true",),
        "engine.extra.flops_profiler.enabled": ("true",), "engine.extra.prescale_gradients": ("true",),
        "engine.extra.zero_optimization.round_robin_gradients": ("true",),
        "engine.extra.communication_data_type": ("fp32", "bf16"),
    },
    "engine=torch": {"engine.accelerate": ("true",)},
    "engine=megatron": {
        "engine.extra.log-interval": (10,), "engine.extra.transformer-impl": ("local", "transformer_engine"),
        "strategy.dispatcher": ("deepep", "alltoall"), "engine.extra.eval-interval": (100, "often"),
        "engine.extra.attention-dropout": (0.1,), "engine.extra.init-method-std": (0.01,),
        "engine.extra.overlap-param-gather": ("true",), "engine.extra.use-distributed-optimizer": ("true",),
        "engine.extra.fp8-format": ("hybrid",), "engine.extra.recompute-activations": ("true",),
        "engine.extra.log-throughput": ("true",), "engine.extra.tp-comm-overlap": ("true",),
    },
    "engine=megatron_deepspeed": {"engine.extra.log-interval": (10,), "engine.extra.eval-iters": (0, 5)},
}  # fmt: skip
"""What belongs to a strategy or engine."""


def _modes(given: Given) -> Words:
    """Settings of the strategy and the engine; carelessly those of any."""
    own = (f"strategy={given.strategy}", f"engine={given.engine}")
    words = ["strategy.nvme.path=/nvme/job"] if given.strategy == "zero3_nvme_offload" else []
    for of, settings in MODES.items():
        share = 0.12 if of in own else 0.01 if given.careless else 0
        words += [
            f"{key}={given.dice.choice(values)}" for key, values in settings.items() if given.chance(share)
        ]
    needs = "engine.activation_checkpointing.cpu=true"
    return [word for word in words if word != needs or given.careless]


def _checkpoints(given: Given) -> Words:
    every: dict[str, tuple[object, ...]] = {
        "checkpoint.every": (0, 1, 100, "auto"), "checkpoint.save_seconds": (30, 300.5),
        "checkpoint.dir": ("/checkpoints/run", "relative/place"), "checkpoint.keep": (1, 3),
        "checkpoint.async": ("true",), "checkpoint.load": ("/checkpoints/old",), "checkpoint.universal": ("true",),
    }  # fmt: skip
    if not given.careless and given.engine != "native":
        del every["checkpoint.keep"], every["checkpoint.async"]  # of dslaunch.runtime
    if not given.careless:
        del every["checkpoint.universal"]
        every["checkpoint.every"] = (0, 1, 100)
    return [f"{key}={given.dice.choice(values)}" for key, values in every.items() if given.chance(0.08)]


def _goal(given: Given) -> Words:
    words: Words = []
    if (given.strategy == "auto" or given.careless) and given.chance(0.3):
        goals = ["throughput", "lowest_memory"]
        if given.world <= 256:  # these search every number of nodes
            goals += ["fewest_gpus", "deadline", "cost"]
        goal = given.dice.choice(goals)
        words.append(f"goal={goal}")
        if goal in ("deadline", "cost") and given.chance(0.9):
            words += [f"goal.tokens={given.one('1e9', '1e12')}", f"goal.days={given.one(1, 30, 0.5)}"]
        words += [] if given.careless else ["cluster.price_per_gpu_hour=2.5"]
    if given.chance(0.12):
        words.append(f"goal.memory_fraction={given.one(0.7, 0.9, 1, 1)}")
    return words


def _launcher(given: Given) -> Words:
    if given.chance(0.5):
        return []
    several = ["ssh", "openmpi", "slurm", "slurm", "slurm", "kubernetes", "kubernetes"]
    alone = ["local", "torchrun"] if given.careless or given.world <= given.node else []
    launcher = given.dice.choice([*several, *alone])
    words = [f"launcher={launcher}"]
    if launcher == "slurm":
        every: dict[str, tuple[object, ...]] = {
            "partition": ("gpu",), "account": ("vla",), "time": ("12:00:00", "2-00:00:00", "30"), "qos": ("high",),
            "constraint": ("a100&ib",), "exclude": ("n[1-2]",), "mem": (0, "500G"), "exclusive": ("false",),
            "cpus_per_task": (1, 8), "signal_before_s": (120,), "requeue": (1, 3), "spare_nodes": (1, 2),
            "continuations": (1, 2), "modules": ("[cuda/12.4,nccl]",), "segment": (1, 2, 4),
            "sbatch_extra": ("['--mail-type=END']",), "comment": ("two words",), "switches": ("1@00:30:00",),
        }  # fmt: skip
        words += [
            f"launcher.slurm.{k}={given.dice.choice(v)}" for k, v in every.items() if given.chance(0.15)
        ]
    if launcher == "kubernetes":
        words += ["launcher.kubernetes.image=registry/train:1"] if given.chance(0.95) else []
        words += (
            [f"launcher.kubernetes.kind={given.one('pytorchjob', 'jobset')}"] if given.chance(0.6) else []
        )
        for word in ("namespace=vla", "volume_claim=runs", "queue=gpus", "secret=keys", "shared_memory=1Gi"):
            words += [f"launcher.kubernetes.{word}"] if given.chance(0.2) else []
    if launcher in ("ssh", "openmpi") and not (given.careless and given.chance(0.3)):
        words.append(
            f"cluster.hosts=[{','.join(f'n{host}' for host in range(max(1, given.world // given.node)))}]"
        )
    if given.chance(0.15):
        words.append(f"launcher.runner={given.one('direct', 'torchrun', 'deepspeed')}")
    if given.chance(0.1):
        words.append(f"launcher.timeout_minutes={given.one(1, 30, 120, 0.5)}")
    if given.chance(0.1):
        words.append(f"launcher.master_port={given.one(29500, 1024, 65535)}")
    if given.chance(0.07) and (launcher == "slurm" or given.careless):
        words += [
            "launcher.container.kind=" + given.one("pyxis", "apptainer"),
            "launcher.container.image=image",
        ]
    if given.chance(0.07):
        words.append("launcher.bind_cpus=true")
    return words


def _rest(given: Given) -> Words:
    """Models, profiles, environment, supervision."""
    choices: dict[str, tuple[object, ...]] = {
        "profile": ("torch", "nsys"), "profile.ranks": ("[0,1]",), "restart.max": (0, 3),
        "watchdog.minutes": (0, 60), "env.NCCL_DEBUG": ("INFO",), "env.NOTE": ("two words; $HOME 'x'",),
        "env.CUDA_DEVICE_MAX_CONNECTIONS": ("1", "8"), "run.root": ("elsewhere",),
        "launcher.pass_env": ("[WANDB_API_KEY]",), "env.PYTORCH_CUDA_ALLOC_CONF": ("expandable_segments:True",),
    }  # fmt: skip
    words = [f"{key}={given.dice.choice(values)}" for key, values in choices.items() if given.chance(0.04)]
    if given.careless:
        words += [word for word in ("restart.elastic=true", "data.workers=2") if given.chance(0.1)]
    if given.chance(0.12) and len(given.components) == 1 and not given.components[given.trunk].get("lora"):
        words.append(f"model={given.dice.choice(MODELS if given.careless else DECODERS)}")
    return words


def mistake(given: Given) -> str:
    """A slip of the fingers, or a value that is none."""
    return str(
        given.one(
            "training.global_bacth=64", "strategy=zero4", "training.precision=bf32", "training.micro_batch=0",
            "training.micro_batch=-1", "training.seq_len=2048.5", "training.optimizer.lr=abc", "cluster=64xZ100",
            "engine=deepsped", "training.optimizer.betas=[0.9]", f"strategy.{given.trunk}.tp=0",
            f"strategy.{given.trunk}.zero=4", "strategy.nobody.tp=2", "model.components.nobody.train=nothing",
            "goal=speed", "launcher=slrum", "engine.version=99.9", "checkpoint.every=-1", "training.steps=0",
            "training.clip=nan", "training.optimizer.lr=inf", "launcher.slurm.time=12h", "training.seed=-1",
            "goal.memory_fraction=1.5", "env.A.B=1", "training=none", "strategy.every.tp=two",
            "training.steps=1e3", f"strategy.{given.trunk}.layers_per_stage=[1,2]",
            f"strategy.{given.trunk}.rank_offset=8",
            "training.optimizer.warmup_steps=1000000000", "training.optimizer.min_lr=1", "cluster=0xH100",
            f"model.components.{given.trunk}.hidden=-4", f"model.components.{given.trunk}.heads=7",
            "training.global_batch=1000000007", "engine.extra.no_such_key=1", "checkpoint.every=auto",
            "launcher.kubernetes.image=Image:X:Y", "training.global_batch=", "strategy=",
            "training.optimizer.schedule=cosin",
            "model.components.llm.train=lora", "cluster.gpu.memory_gib=0", "training.global_batch=null",
        )
    )  # fmt: skip


PARTS: tuple[Callable[[Given], Words], ...] = (
    _version, _batch, _sequence, _numbers, _optimizer, _trained, _layout, _modes, _checkpoints, _goal, _launcher,
    _rest,
)  # fmt: skip
"""Each adds words of one subject."""
