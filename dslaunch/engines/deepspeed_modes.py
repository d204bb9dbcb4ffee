"""DeepSpeed's modes beside its ZeRO stages: which are asked for, and what stands against them.

Sources: deepspeed/runtime/{engine,config}.py, runtime/zero/{config,stage_1_and_2,stage3}.py, runtime/zenflow/,
runtime/superoffload/, utils/groups.py, 0.19.8, and the releases since 0.16.9 where a version is named.
"""

from __future__ import annotations

from collections.abc import Mapping

from dslaunch.engines.deepspeed_keys import newest, release, table
from dslaunch.engines.layout import Layout
from dslaunch.engines.versions import named
from dslaunch.hardware.topology import describe
from dslaunch.schema.config import RunConfig
from dslaunch.schema.model import Component, Decoder, Mlp, Other, Transformer

AUTOTP_ZERO3 = "0.19.4"
"""The first release that takes ZeRO-3 under AutoTP; the ones before assert stage 2 or less."""
ZENFLOW_ZERO3 = "0.18.1"
"""The first release with ZenFlow at ZeRO-3 (runtime/zenflow/engine_stage3.py)."""
RUNTIME = "dslaunch.runtime"
_NEW = {
    "strategy.zenflow": ("zero_optimization", "zenflow"),
    "strategy.super_offload": ("zero_optimization", "offload_optimizer", "super_offload"),
}


def asked(config: RunConfig) -> dict[str, bool]:
    """By key of dslaunch: whether a mode that only the engine `deepspeed` has is asked for."""
    strategy, engine, plus = config.strategy, config.engine, config.strategy.zero_plus_plus
    monitor = engine.monitor
    return {
        "strategy.zero_plus_plus": plus.hpz != 1 or plus.quantized_weights or plus.quantized_gradients,
        "strategy.zenflow": strategy.zenflow.enabled,
        "strategy.super_offload": strategy.super_offload.enabled,
        "engine.huggingface": engine.huggingface,
        "engine.activation_checkpointing": engine.activation_checkpointing.enabled,
        "engine.monitor": any(
            each.enabled for each in (monitor.tensorboard, monitor.csv, monitor.wandb, monitor.comet)
        ),
        "checkpoint.universal": config.checkpoint.universal,
    }


def only_deepspeed(config: RunConfig, engine: str) -> list[str]:
    """The modes that `engine` would silently leave out: a sentence each."""
    if engine == "deepspeed":
        return []
    return [f"{key} is DeepSpeed's; {engine} does not have it" for key, wanted in asked(config).items() if wanted]


def version_of(config: RunConfig) -> str:
    """The DeepSpeed that is rendered for."""
    return named(config.engine.version, table().versions) or newest()


def _before(config: RunConfig, first: str) -> bool:
    """Whether a version of the table is rendered for that is older than `first`."""
    version = version_of(config)
    return version in table().versions and release(version) < release(first)


def hpz(config: RunConfig) -> int:
    """Ranks of hpZ's second partition; 1 is none."""
    wanted = config.strategy.zero_plus_plus.hpz
    return config.cluster.slots if wanted == "node" else wanted


def limits(config: RunConfig, layouts: Mapping[str, Layout]) -> list[str]:
    """What stands against the layouts and the modes asked for: a sentence each, naming the key."""
    if not layouts:
        return []
    name = config.model.trunk if config.model.trunk in layouts else next(iter(layouts))
    layout, key = layouts[name], f"strategy.{name}"
    return [
        *_new(config),
        *_tensor_parallel(config, key, layout),
        *_ulysses(config, layouts),
        *_zero_plus_plus(config, key, layout),
        *_nvme(config, key, layout),
        *_zenflow(config, key, layout),
        *_super_offload(config, key, layout),
        *_activation_checkpointing(config),
        *_huggingface(config),
    ]


def _new(config: RunConfig) -> list[str]:
    """Modes that the version does not have yet."""
    version, wanted = version_of(config), asked(config)
    known = version in table().versions
    return [
        f"{key} is asked for, but engine.version is {version}, and DeepSpeed has {'.'.join(path)} since "
        f"{table().key(path).since}. Set engine.version={table().key(path).since} or newer, or turn {key} off"
        for key, path in _NEW.items()
        if known and wanted[key] and table().key(path).lacks(version)
    ]


def _tensor_parallel(config: RunConfig, key: str, layout: Layout) -> list[str]:
    if layout.tp == 1:
        return []
    if config.engine.name == "auto":
        return [f"{key}.tp is {layout.tp}; deepspeed's AutoTP is taken by name alone: engine=deepspeed"]
    faults = []
    trunk = config.model.components[config.model.trunk]
    if isinstance(trunk, Decoder) and trunk.mamba:
        faults.append(
            f"{key}.tp is {layout.tp}: AutoTP cuts linear layers by their names, and a Mamba layer's projections "
            "are several of them in one; set tp to 1"
        )
    if layout.cp > 1:
        faults.append(
            f"{key}.tp is {layout.tp} and {key}.cp is {layout.cp}: AutoTP and Ulysses each make their own mesh of "
            "the ranks; set one of them to 1"
        )
    if layout.zero == 3 and _before(config, AUTOTP_ZERO3):
        faults.append(
            f"{key}.zero is 3 with tp {layout.tp}: DeepSpeed {version_of(config)} asserts stage 2 or less under "
            f"AutoTP. Set engine.version={AUTOTP_ZERO3} or newer, or {key}.zero=2"
        )
    return faults


def _ulysses(config: RunConfig, layouts: Mapping[str, Layout]) -> list[str]:
    """Between the two all-to-alls of attention each rank holds whole sequences of some heads."""
    name = config.model.trunk
    cp = layouts[name].cp if name in layouts else 1
    if cp == 1:
        return []
    if config.engine.name == "auto":
        return [f"strategy.{name}.cp is {cp}; deepspeed's Ulysses is taken by name alone: engine=deepspeed"]
    component = config.model.components[name]
    if isinstance(component, Decoder) and component.mamba:
        return [
            f"strategy.{name}.cp is {cp}: Ulysses exchanges heads around attention, and {name}'s Mamba layers "
            "need the whole sequence; set cp to 1"
        ]
    return _head_faults(name, component, cp)


def _head_faults(name: str, component: Component, cp: int) -> list[str]:
    if isinstance(component, Mlp | Other):
        return []
    faults = []
    if component.heads % cp:
        faults.append(
            f"strategy.{name}.cp is {cp}: Ulysses gives each rank some of the {component.heads} heads, and "
            f"{component.heads} / {cp} = {component.heads / cp:.4g} is not whole"
        )
    kv = (component.kv_heads if isinstance(component, Decoder | Transformer) else None) or component.heads
    if kv % cp and cp % kv:
        faults.append(f"strategy.{name}.cp is {cp}: neither divides kv_heads {kv} nor is a multiple of it")
    return faults


def _zero_plus_plus(config: RunConfig, key: str, layout: Layout) -> list[str]:
    plus, section = config.strategy.zero_plus_plus, "strategy.zero_plus_plus"
    if not asked(config)[section]:
        return []
    faults = []
    if layout.zero != 3:
        faults.append(f"{section} is set, but {key}.zero is {layout.zero}: DeepSpeed reads it at ZeRO-3 only")
    if layout.tp > 1 or layout.cp > 1:
        faults.append(f"{section} cuts over consecutive ranks, and {key} has tp {layout.tp} x cp {layout.cp}")
    if config.cluster.gpu.accelerator == "cpu" and (plus.quantized_weights or plus.quantized_gradients):
        faults.append(f"{section}: int8 and int4 communication have GPU kernels alone; this cluster has CPUs")
    size, slots = hpz(config), config.cluster.slots
    if size > 1 and slots % size:
        near = ", ".join(str(n) for n in range(2, slots + 1) if slots % n == 0) or "1 (off)"
        faults.append(
            f"{section}.hpz is {size}: groups of {size} ranks do not fill the {slots} GPUs of a node "
            f"({describe(config.cluster)}), and would gather over the network; allowed: {near}, or node"
        )
    return faults


def _nvme(config: RunConfig, key: str, layout: Layout) -> list[str]:
    if not layout.offload.startswith("nvme"):
        return []
    faults, node = [], config.cluster.node
    if layout.zero != 3:
        faults.append(
            f"{key}.offload is {layout.offload}, but zero is {layout.zero}: below ZeRO-3 DeepSpeed puts the "
            f"states in host memory without a word. Set {key}.zero=3, or offload=cpu"
        )
    if not node.nvme_gib:
        faults.append(
            f"{key}.offload is {layout.offload}, but the nodes have no NVMe (cluster.node.nvme_gib is 0). Set it "
            "where yours have, or offload=cpu"
        )
    if node.nvme_gib and not node.nvme_gb_per_s:
        faults.append("cluster.node.nvme_gb_per_s is 0: give the bandwidth of the nodes' NVMe, GB/s")
    if layout.offload == "nvme_params" and hpz(config) > 1:
        faults.append(
            f"{key}.offload is nvme_params: hpZ's second partition cannot be kept on NVMe. Set "
            f"strategy.zero_plus_plus.hpz=1, or {key}.offload=nvme"
        )
    if not config.strategy.nvme.path:
        faults.append(
            "strategy.nvme.path is empty: name a folder on the nodes' NVMe, one for each job, such as "
            "strategy.nvme.path=/local_nvme/run1"
        )
    return faults


def _zenflow(config: RunConfig, key: str, layout: Layout) -> list[str]:
    zenflow, section = config.strategy.zenflow, "strategy.zenflow"
    if not zenflow.enabled:
        return []
    faults = []
    if layout.offload != "cpu":
        faults.append(f"{section} needs {key}.offload=cpu; it is {layout.offload}")
    if layout.zero == 3 and _before(config, ZENFLOW_ZERO3):
        faults.append(
            f"{section} with {key}.zero 3 came with DeepSpeed {ZENFLOW_ZERO3}; engine.version is "
            f"{version_of(config)}"
        )
    if layout.num_microbatches > 1:
        faults.append(
            f"{section}: DeepSpeed puts update_interval in place of the accumulation steps, so num_microbatches "
            f"must be 1, not {layout.num_microbatches}. Set training.micro_batch="
            f"{layout.micro_batch * layout.num_microbatches}, or a smaller training.global_batch"
        )
    if zenflow.select_interval < zenflow.update_interval:
        faults.append(
            f"{section}.select_interval is {zenflow.select_interval}, less than update_interval "
            f"{zenflow.update_interval}; it must be at least that"
        )
    return faults


def _super_offload(config: RunConfig, key: str, layout: Layout) -> list[str]:
    if not config.strategy.super_offload.enabled:
        return []
    faults, section = [], "strategy.super_offload"
    if layout.zero != 3 or layout.offload not in ("cpu", "cpu_params"):
        faults.append(
            f"{section} needs {key}.zero=3 and offload=cpu; they are {layout.zero} and {layout.offload}"
        )
    if config.strategy.zenflow.enabled:
        faults.append(f"{section} and strategy.zenflow each replace the optimizer; turn one of them off")
    if config.cluster.gpu.accelerator == "cpu":
        # What DeepSpeed asserts is PyTorch's device type "cuda", which AMD's GPUs have too.
        faults.append(f"{section} runs on GPUs alone; the cluster has CPUs")
    return faults


def _activation_checkpointing(config: RunConfig) -> list[str]:
    wanted = config.engine.activation_checkpointing
    if not wanted.enabled or not wanted.contiguous or (wanted.partition_activations and wanted.number):
        return []
    return [
        "engine.activation_checkpointing.contiguous needs partition_activations=true and number (of activations "
        "kept), from which the buffer is sized"
    ]


def _huggingface(config: RunConfig) -> list[str]:
    if not config.engine.huggingface or config.module != RUNTIME:
        return []
    return [f"engine.huggingface is true, but {RUNTIME} is no Trainer and fills in no `auto`; set it to false"]
