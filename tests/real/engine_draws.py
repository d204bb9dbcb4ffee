"""What is drawn for DeepSpeed's engine: each key right, at its bounds and wrong, and what a script does with it.

A configuration has several sections at once, and most of its values are right: else the first wrong one would hide
the others. What depends on the machine alone (NVMe, monitors' packages, operators that are compiled) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hypothesis import strategies as st

from dslaunch.engines.deepspeed_keys import Key, table
from dslaunch.rules.deepspeed.torch_arguments import OPTIMIZERS, SCHEDULES, TORCH_SCHEDULES, Argument


@dataclass(frozen=True)
class Asked:
    """A configuration, and how a script runs it."""

    config: dict[str, Any]
    stages: int = 1
    """Of the pipeline; 1: a plain module."""
    world: int = 8
    optimizer: str = ""
    """The class of torch.optim that the script hands over; empty: none."""
    schedule: bool = False
    """Whether the script hands over a schedule of torch's."""
    data: bool = False
    """Whether the script hands over a dataset, and trains on what comes back."""
    steps: int = 1
    """Of the optimizer."""
    evaluate: bool = False
    """Whether a forward pass in evaluation stands between the steps."""
    save: bool = False
    """Whether a checkpoint is written; and loaded again where there is one rank."""

    def line(self) -> dict[str, Any]:
        """As the worker is asked."""
        return asdict(self)

    def script(self) -> str:
        """The script of this run, but for the model, which is none of a class that is known."""
        handed = ["model=model", "model_parameters=model.parameters()", 'config="ds_config.json"']
        lines = ["import deepspeed", "import torch", "from ours import build, read", "", "model = build()"]
        if self.optimizer:
            lines.append(f"optimizer = torch.optim.{self.optimizer}(model.parameters(), lr=0.1)")
            handed.append("optimizer=optimizer")
        if self.schedule:
            lines += ["def schedule(made):", "    return torch.optim.lr_scheduler.LambdaLR(made, lambda _: 1.0)"]
            handed.append("lr_scheduler=schedule")
        if self.data:
            handed.append("training_data=read()")
        lines.append(f"engine, _, loader, _ = deepspeed.initialize({', '.join(handed)})")
        if self.stages > 1:
            return "\n".join([*lines, "engine.train_batch(read())", ""])
        loop = "for rows in loader:" if self.data else "for rows in read():"
        passes = ["loss = engine(rows)", "engine.backward(loss)", "engine.step()"]
        return "\n".join([*lines, loop, *(f"    {each}" for each in passes), ""])


_SAFE = {
    "aio.use_gds": [False], "comet.enabled": [False], "wandb.enabled": [False], "tensorboard.enabled": [False],
    "hybrid_engine.enabled": [False], "zero_optimization.offload_optimizer.device": ["cpu", "cpu", "none", "disk"],
    "zero_optimization.offload_param.device": ["cpu", "none", "disk"], "autotuning.enabled": [False],
    "zero_optimization.offload_optimizer.super_offload": [False], "fp16.auto_cast": [False],
    "dataloader_drop_last": [True, False], "train_micro_batch_size_per_gpu": [1, 2],
    "zero_optimization.zero_quantized_gradients": [False], "zero_optimization.zero_quantized_weights": [False],
    "checkpoint.use_node_local_storage": [False, True],
}  # fmt: skip
"""Values of keys that would ask for a package, a GPU or a compiler, or for what the model of the tests isn't."""
_OF_OTHERS: dict[str, Sequence[Any]] = {
    "zero_optimization.stage": [0, 1, 1, 2, 2, 3, 3, "2", True],
    "tensor_parallel.autotp_size": [0, 1, 1, -2, 16],
    "zero_optimization.zero_hpz_partition_size": [1, 1, 2, 4, 3, 16],
    "sequence_parallel_size": [1, 1, 2, 3, 0],
    "train_batch_size": [8, 16, 32], "gradient_accumulation_steps": [1, 1, 2, 4],
    "communication_data_type": ["fp32", "fp16", "bf16", "float"],
    "zero_optimization.allgather_bucket_size": [2, 1000, 1001, 5e8, 0],
    "zero_optimization.reduce_bucket_size": [1, 1000, 5e8, 0],
    "zero_optimization.sub_group_size": [1, 10, 1e9, 0],
    "zero_optimization.zenflow.select_interval": ["auto", 1, 4, 0],
    "zero_optimization.zenflow.update_interval": [1, 4, "auto", 0],
    "zero_optimization.zenflow.topk_ratio": [0.1, 1.0, 0.0],
    "torch_autocast.lower_precision_safe_modules": [["torch.nn.Linear"], ["Linear"], []],
    "data_types.keep_in_fp32_modules": [["0"], [], "0"],
    "steps_per_print": [1, 10, 1, 0, None, "1", 2.0, True], "gradient_clipping": [0, 1.0, 0.5, -1, "1.0", True],
    "fp16.initial_scale_power": [0, 4, 16, 32, 63, 64, -1], "fp16.loss_scale": [0, 128, 1.0, -1, 0.5],
    "fp16.loss_scale_window": [1, 2, 1000, 0], "fp16.min_loss_scale": [1, 0, 8], "fp16.hysteresis": [1, 2, 0, -1],
    "flops_profiler.profile_step": [1, 2, 1, 0, 100], "flops_profiler.output_file": [None, "profile.txt"],
    "csv_monitor.output_path": ["", "csv"],
    "zero_optimization.leaf_module.classes": [["own.Layer"], [], "own.Layer"],
    "zero_optimization.leaf_module.names": [["1"], ["1", "x"], [], "1"],
    "zero_optimization.leaf_module.name_suffixes": [["1"], ["x"], [], "1"],
    "data_efficiency.data_routing.random_ltd": [{"enabled": False}],
    "data_efficiency.data_sampling.curriculum_learning": [{"enabled": False}],
    "data_efficiency.data_sampling.dynamic_batching": [{"enabled": False}],
    "expert_parallel.enabled": [False, False, True], "expert_parallel.autoep_size": [1, 2, 3, 8],
    "pipeline.partition": ["uniform", "parameters", "best", "type:Linear"], "pipeline.stages": ["auto", 2],
    "pipeline.activation_checkpoint_interval": [0, 1, 2],
}  # fmt: skip
"""Values that are met where others would say too little, or ask for a machine."""
_ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2.5, 1e12, "8", "x", "auto", "true", "", [], ["a"], {}, {"enabled": True},
]  # fmt: skip
_UNMET = ("checkpoint.writer",)
"""A section that asks for a GPU where it stands."""
_NEVER = frozenset({
    "vocabulary_size", "elasticity", "compression_training", "datastates_ckpt",
})  # fmt: skip
"""The accidents of the parser that no table states, and what has a test of its own."""


def right(path: str, key: Key) -> list[Any]:
    """Values that the table takes, its bounds among them, and some just beyond."""
    if (own := _SAFE.get(path) or _OF_OTHERS.get(path)) is not None:
        return list(own)
    if key.choices:
        return [*key.choices, *([str(each).upper() for each in key.choices] if key.fold else [])]
    low, high = key.ge if key.ge is not None else key.gt, key.le if key.le is not None else key.lt
    bounds = [each for each in (low, high) if each is not None]
    near = [*bounds, *([low + 1, low - 1] if low is not None else []), *([high + 1] if high is not None else [])]
    whole = [int(each) for each in near]
    kinds: dict[str, list[Any]] = {
        "bool": [True, False], "int": [*whole, 1, 2, 1000, "4"], "plain_int": [*whole, 1, 4],
        "float": [*near, 0.5, 1, 1.0], "str": ["x", ""], "list": [[], ["a"]], "list[str]": [[], ["a"]],
        "dict": [{}], "none": [None], "any": [None, 1, "x", True], "dtype": [None],
    }  # fmt: skip
    values = [value for kind in key.type.split("|") for value in kinds.get(kind, [])]
    return values + ([None] if key.null else [])


def value(path: str, key: Key) -> st.SearchStrategy[Any]:
    """Mostly what the table takes."""
    plain = st.sampled_from(right(path, key) or [None])
    if path in _SAFE:
        return plain
    return st.integers(0, 24).flatmap(lambda odd: plain if odd else st.sampled_from(_ODD))


def below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def keys_of(path: str) -> list[str]:
    """Keys with a value of their own, and none whose presence alone is refused."""
    keys = table().sections[path].keys
    return sorted(
        name for name, key in keys.items()
        if key.type != "section" and not key.removed and below(path, name) not in _NEVER
    )  # fmt: skip


def argument(taken: Argument) -> list[Any]:
    """Values of an optimizer's or a schedule's argument: inside, at the bounds and outside."""
    low = taken.least if taken.least is not None else taken.above
    high = taken.most if taken.most is not None else taken.below
    near = [each for each in (low, high) if each is not None]
    inside: dict[str, list[Any]] = {
        "any": [True, False], "number": [0.1, 1, *near], "switch": [True, False], "float": [0.5, *near],
        "whole": [1, 5, *near], "pair": [[0.9, 0.95], [0.5, 0.9], *([[low, low]] if low is not None else [])],
        "rate": [0.1, 0.01], "choice": [*taken.choices], "items": [[1, 2]], "nothing": [None],
    }  # fmt: skip
    outside = [*([-1] if low is not None else []), *([2] if high is not None else [])]
    return [*inside[taken.kind] * 3, *outside, "0.1", *([None] if taken.null else [])]


def some_of(taken: dict[str, Argument] | Any, always: Sequence[str] = ()) -> st.SearchStrategy[dict[str, Any]]:
    strategies = {name: st.sampled_from(argument(each)) for name, each in taken.items()}
    return st.lists(st.sampled_from(sorted(strategies)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: strategies[name] for name in {*names, *always} & {*strategies}})
    )


_NEEDED = {
    "CosineAnnealingLR": ("T_max",), "CosineAnnealingWarmRestarts": ("T_0",), "CyclicLR": ("base_lr", "max_lr"),
    "ExponentialLR": ("gamma",), "MultiStepLR": ("milestones",), "OneCycleLR": ("max_lr", "total_steps"),
    "StepLR": ("step_size",), "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "WarmupDecayLR": ("total_num_steps", "warmup_num_steps"),
    "WarmupCosineLR": ("total_num_steps", "warmup_num_steps"), "WarmupLR": ("warmup_num_steps",),
}  # fmt: skip
_WARM: dict[str, list[Any]] = {
    "warmup_num_steps": [1, 2, 10, 100, 0, 2.5], "total_num_steps": [2, 100, 1, 1000],
    "warmup_type": ["linear", "log", "x"], "last_batch_iteration": [-1, 0, 3],
}  # fmt: skip


@st.composite
def optimizers(draw: st.DrawFn) -> dict[str, Any]:
    often = ["Adam", "AdamW", "AdamW", "Muon", "adamw", "ADAM", "Adamw2"]
    name = draw(st.sampled_from([*sorted(OPTIMIZERS), *often]))
    own = name.lower() in ("adam", "adamw")
    taken = OPTIMIZERS["AdamW" if own else name] if own or name in OPTIMIZERS else OPTIMIZERS["AdamW"]
    params = draw(some_of(taken))
    if own:
        params["torch_adam"] = True
    if draw(st.integers(0, 15)) == 0:
        others = ["max_grad_norm", "learning_rate", "weigth_decay", "adam_w_mode", "bias_correction"]
        params[draw(st.sampled_from(others))] = 1
    params.pop("capturable", None)
    params.pop("differentiable", None)
    return {"type": name, "params": params}


@st.composite
def schedulers(draw: st.DrawFn) -> dict[str, Any]:
    every = {**SCHEDULES, **TORCH_SCHEDULES}
    name = draw(st.sampled_from([*sorted(SCHEDULES) * 2, *sorted(TORCH_SCHEDULES), "Cosine", "warmuplr"]))
    if name not in every:
        return {"type": name, "params": {}}
    params = draw(some_of(every[name], _NEEDED.get(name, ()) if draw(st.integers(0, 9)) else ()))
    for key in params:
        if name in SCHEDULES and key in _WARM:
            params[key] = draw(st.sampled_from(_WARM[key]))
    return {"type": name, "params": params} if draw(st.integers(0, 19)) else {"type": name}


def _is_universal(config: dict[str, Any]) -> bool:
    """Whether a checkpoint of another form is asked for than the one that is saved here."""
    section = config.get("checkpoint")
    return isinstance(section, dict) and bool(section.get("load_universal"))


FREQUENT = [
    "", "", *["zero_optimization"] * 2, "zero_optimization.offload_optimizer", "fp16", "bf16", "bf16",
    "optimizer", "scheduler", "data_types", "torch_autocast", "zero_optimization.zenflow",
]  # fmt: skip


SECTIONS = sorted(set(table().sections) - set(_UNMET))


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A configuration of several sections, most of it right."""
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    paths = st.lists(st.one_of(st.sampled_from(FREQUENT), st.sampled_from(SECTIONS)), max_size=6)
    for path in dict.fromkeys(draw(paths)):
        if path in ("optimizer", "scheduler"):
            config[path] = draw(optimizers() if path == "optimizer" else schedulers())
            continue
        section: Any = config
        for part in filter(None, path.split(".")):
            section = section.setdefault(part, {}) if isinstance(section, dict) else None
        keys, names = table().sections[path].keys, keys_of(path)
        drawn = draw(st.lists(st.sampled_from(names), max_size=4, unique=True)) if names else []
        if path and "enabled" in keys and draw(st.integers(0, 3)):
            drawn = [*drawn, "enabled"]
        for name in drawn if isinstance(section, dict) else ():
            if not isinstance(section.get(name), dict):
                section[name] = draw(value(below(path, name), keys[name]))
    if draw(st.integers(0, 59)) == 0:
        config[draw(st.sampled_from(_SLIPS))] = {"enabled": False}
    return config


_SLIPS = ["zero_optimizaton", "amp", "fp8", "offload_optimizer", "stage"]


@st.composite
def runs(draw: st.DrawFn) -> Asked:
    """A configuration, and a script's way to run it."""
    config = draw(configs())
    zero = config.setdefault("zero_optimization", {})
    if isinstance(zero, dict):
        zero.setdefault("stage", draw(st.sampled_from([0, 1, 1, 2, 2, 3, 3])))
        if zero["stage"] == 3:
            zero.pop("zenflow", None)  # whose streams are CUDA's
    stages = draw(st.sampled_from([1, 1, 1, 1, 1, 1, 2, 4, 3]))
    alone = stages == 1
    own = draw(st.sampled_from(["", "", "", "", "AdamW", "SGD", "Adam"])) if alone else ""
    schedule = draw(st.integers(0, 7)) == 0 and alone
    if own:
        config.pop("optimizer", None)  # which wouldn't be read
    else:
        config.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 0.0001, "torch_adam": True}})
    if schedule:
        config.pop("scheduler", None)
    return Asked(
        config, stages, world=draw(st.sampled_from([8, 8, 8, 1, 2, 4, 6, 12])), optimizer=own, schedule=schedule,
        data=draw(st.integers(0, 5)) == 0 and alone, steps=draw(st.sampled_from([1, 1, 2, 3])),
        evaluate=draw(st.integers(0, 5)) == 0,
        save=draw(st.integers(0, 5)) == 0 and not _is_universal(config),
    )  # fmt: skip
