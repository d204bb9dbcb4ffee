"""What torch's and DeepSpeed's optimizers and schedules take: each argument with its type and range.

torch 2.13, DeepSpeed 0.19.8. A test hands each of them a row of values, and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dslaunch.errors import listed

Kind = Literal["any", "number", "switch", "float", "whole", "pair", "rate", "choice", "items", "nothing"]


@dataclass(frozen=True)
class Argument:
    """What a value must be for the class to be built and stepped."""

    kind: Kind
    """any: nothing goes wrong, or it depends on the device; rate: a number, or a list with one for each group of
    parameters; items: what Python goes through one by one; nothing: what JSON can't hold, such as a function."""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    zero: bool = True
    """Whether 0 is taken."""
    null: bool = False
    """Whether null is; in a pair, for each of its items."""
    choices: tuple[str | int, ...] = ()
    point: bool = False
    """Whether a whole number is refused in a pair; DeepSpeed's reader of JSON makes one of 0.0 too."""

    def takes(self, value: Any) -> bool:
        """Whether `value`, as JSON has it, is taken; `auto` stands for one that is."""
        if self.kind == "any" or value == "auto":
            return True
        if self.kind == "pair":
            if not (isinstance(value, list) and len(value) == 2):
                return False
            whole = self.point and any(isinstance(each, int) for each in value)
            return not whole and all(self._takes_one(each) for each in value)
        if self.kind == "rate" and isinstance(value, list):
            return bool(value) and all(self._takes_one(each) for each in value)
        if self.kind == "items":
            return value is None or isinstance(value, str | list | dict)
        return self._takes_one(value)

    def _takes_one(self, value: Any) -> bool:
        if value is None:
            return self.null
        if self.kind == "choice":
            return value in self.choices
        if self.kind == "nothing" or not isinstance(value, int | float):
            return False
        kind = {"whole": int, "float": float}.get(self.kind)
        return (kind is None or isinstance(value, kind)) and self._within(value)

    def _within(self, size: float) -> bool:
        return (
            (self.least is None or size >= self.least)
            and (self.above is None or size > self.above)
            and (self.most is None or size <= self.most)
            and (self.below is None or size < self.below)
            and (self.zero or size != 0)
        )

    @property
    def words(self) -> str:
        """What is taken, in words."""
        if self.kind == "choice":
            return listed([str(each) for each in self.choices])
        bounds = [
            ("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below),
        ]  # fmt: skip
        limits = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
        kind = f"{_WORDS[self.kind]} {limits}".rstrip() + ("" if self.zero else " other than 0")
        kind += " (no 0: DeepSpeed hands 0.0 on as a whole number)" if self.point else ""
        return f"{kind} or null" if self.null and self.kind not in ("nothing", "switch") else kind


_WORDS = {
    "any": "anything", "number": "a number", "switch": "true or false",
    "float": "a number with a decimal point", "whole": "a whole number",
    "pair": "a list of two numbers", "rate": "a number", "items": "a list", "nothing": "null",
}  # fmt: skip
_ANY, _NUMBER, _RATE = Argument("any"), Argument("number"), Argument("rate")
_POSITIVE = Argument("number", least=0)
_SHARE = Argument("number", least=0, most=1)
_STEPS = Argument("whole", least=1)
_DIVISOR = Argument("number", zero=False)
_FUNCTION = Argument("nothing", null=True)
_BETAS = Argument("pair", least=0, below=1)
_ADAM = {"lr": _POSITIVE, "betas": _BETAS, "eps": _POSITIVE, "weight_decay": _POSITIVE}
_OF_ADAM = {**_ADAM, "betas": Argument("pair", least=0, below=1, point=True)}
_LOOP = dict.fromkeys(("foreach", "maximize", "differentiable"), _ANY)
_CAPTURED = {**_LOOP, "capturable": _ANY}

OPTIMIZERS: Mapping[str, Mapping[str, Argument]] = {
    "ASGD": {
        "lr": _POSITIVE, "lambd": _NUMBER, "alpha": _NUMBER, "t0": _NUMBER, "weight_decay": _POSITIVE, **_CAPTURED,
    },
    "Adadelta": {"lr": _POSITIVE, "rho": _SHARE, "eps": _POSITIVE, "weight_decay": _POSITIVE, **_CAPTURED},
    "Adafactor": {
        "lr": _POSITIVE, "beta2_decay": Argument("number", most=0), "eps": Argument("pair", least=0, null=True),
        "d": Argument("number", least=1), "weight_decay": _POSITIVE, "foreach": _ANY, "maximize": _ANY,
    },
    "Adagrad": {
        "lr": _POSITIVE, "lr_decay": _POSITIVE, "weight_decay": _POSITIVE, "initial_accumulator_value": _POSITIVE,
        "eps": _POSITIVE, **_LOOP, "fused": _ANY,
    },
    "Adam": {**_OF_ADAM, "amsgrad": _ANY, **_CAPTURED, "fused": _ANY, "decoupled_weight_decay": _ANY},
    "AdamW": {**_OF_ADAM, "amsgrad": _ANY, **_CAPTURED, "fused": _ANY},
    "Adamax": {**_ADAM, **_CAPTURED},
    "NAdam": {**_ADAM, "momentum_decay": _POSITIVE, "decoupled_weight_decay": _ANY, **_CAPTURED},
    "RAdam": {**_ADAM, "decoupled_weight_decay": _ANY, **_CAPTURED},
    "RMSprop": {
        "lr": _POSITIVE, "alpha": _POSITIVE, "eps": _POSITIVE, "weight_decay": _POSITIVE, "momentum": _POSITIVE,
        "centered": _ANY, **_CAPTURED,
    },
    "Rprop": {
        "lr": _POSITIVE, "etas": Argument("pair", above=0), "step_sizes": Argument("pair"), **_CAPTURED,
    },
    "SGD": {
        "lr": _POSITIVE, "momentum": _POSITIVE, "dampening": _ANY, "weight_decay": _POSITIVE, "nesterov": _ANY,
        **_LOOP, "fused": _ANY,
    },
}  # fmt: skip
"""torch.optim's that DeepSpeed can step."""

_NUMBERS = Argument("pair")
_SWITCH = Argument("switch", null=True)
"""What pybind11 takes for a bool: no text, no list."""
_FUSED = {"lr": _NUMBER, "betas": _NUMBERS, "weight_decay": _NUMBER}
_FUSED_ADAM = {**_FUSED, "eps": _NUMBER, "amsgrad": _ANY}

OWN_OPTIMIZERS: Mapping[str, Mapping[str, Argument]] = {
    "FusedAdam": {**_FUSED_ADAM, "bias_correction": _ANY, "set_grad_none": _ANY, "adam_w_mode": _ANY},
    "DeepSpeedCPUAdam": {
        **_FUSED_ADAM, "bias_correction": _SWITCH, "adamw_mode": _SWITCH, "fp32_optimizer_states": _ANY,
    },
    "DeepSpeedCPUAdagrad": {
        "lr": _NUMBER, "eps": _NUMBER, "weight_decay": _NUMBER, "amsgrad": _ANY, "fp32_optimizer_states": _ANY,
    },
    "DeepSpeedCPULion": {**_FUSED, "fp32_optimizer_states": _ANY},
    "FusedLion": {**_FUSED, "set_grad_none": _ANY},
    "FusedLamb": {
        **_FUSED_ADAM, "bias_correction": _ANY, "eps_inside_sqrt": _ANY, "max_coeff": _NUMBER,
        "min_coeff": _NUMBER,
    },
}  # fmt: skip
"""DeepSpeed's own, which compute in C++ with any number and check no range. FusedLion and FusedLamb run on GPUs
alone: verified by reading (deepspeed/ops/lion/fused_lion.py, ops/lamb/fused_lamb.py, ops/csrc)."""

_TORCH_LAST = {"last_epoch": Argument("choice", choices=(-1,))}
"""torch takes a later one only with rates of a checkpoint, and those are loaded after the schedule is made."""
_WARMUP = {"warmup_num_steps": _ANY, "warmup_type": _ANY, "last_batch_iteration": _ANY}
_WARMUP_RATES = {**_WARMUP, "warmup_min_lr": _RATE, "warmup_max_lr": Argument("rate", null=True)}

SCHEDULES: Mapping[str, Mapping[str, Argument]] = {
    "WarmupLR": _WARMUP_RATES,
    "WarmupDecayLR": {**_WARMUP_RATES, "total_num_steps": _NUMBER},
    "WarmupCosineLR": {**_WARMUP, "warmup_min_ratio": _NUMBER, "cos_min_ratio": _ANY, "total_num_steps": _NUMBER},
    "OneCycle": {
        "cycle_min_lr": _RATE, "cycle_max_lr": _RATE, "decay_lr_rate": _NUMBER, "cycle_first_step_size": _ANY,
        "cycle_second_step_size": _ANY, "cycle_first_stair_count": _NUMBER, "cycle_second_stair_count": _ANY,
        "decay_step_size": _NUMBER, "cycle_momentum": _ANY, "cycle_min_mom": _RATE, "cycle_max_mom": _RATE,
        "decay_mom_rate": _NUMBER, "last_batch_iteration": _ANY,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": _RATE, "lr_range_test_step_size": _ANY, "lr_range_test_step_rate": _NUMBER,
        "lr_range_test_staircase": _ANY, "last_batch_iteration": _ANY,
    },
}  # fmt: skip
"""DeepSpeed's; the steps of a warm-up and of a cycle are judged by version elsewhere."""

TORCH_SCHEDULES: Mapping[str, Mapping[str, Argument]] = {
    "ConstantLR": {"factor": _SHARE, "total_iters": _ANY, **_TORCH_LAST},
    "CosineAnnealingLR": {"T_max": _DIVISOR, "eta_min": _NUMBER, **_TORCH_LAST},
    "CosineAnnealingWarmRestarts": {"T_0": _STEPS, "T_mult": _STEPS, "eta_min": _NUMBER, **_TORCH_LAST},
    "CyclicLR": {
        "base_lr": _RATE, "max_lr": _RATE, "step_size_up": _DIVISOR,
        "step_size_down": Argument("number", null=True), "gamma": _ANY,
        "mode": Argument("choice", choices=("triangular", "triangular2", "exp_range")),
        "scale_fn": _FUNCTION, "scale_mode": _ANY, "cycle_momentum": _ANY, "base_momentum": _RATE,
        "max_momentum": _RATE, **_TORCH_LAST,
    },
    "ExponentialLR": {"gamma": _NUMBER, **_TORCH_LAST},
    "LinearLR": {
        "start_factor": Argument("number", above=0, most=1), "end_factor": _SHARE, "total_iters": _NUMBER,
        **_TORCH_LAST,
    },
    "MultiStepLR": {"milestones": Argument("items"), "gamma": _NUMBER, **_TORCH_LAST},
    "OneCycleLR": {
        "max_lr": _RATE, "total_steps": Argument("whole", least=1, null=True), "epochs": _ANY,
        "steps_per_epoch": _ANY, "pct_start": Argument("float", least=0, most=1),
        "anneal_strategy": Argument("choice", choices=("cos", "linear")), "cycle_momentum": _ANY,
        "base_momentum": _RATE, "max_momentum": _RATE, "div_factor": _DIVISOR, "final_div_factor": _DIVISOR,
        "three_phase": _ANY, **_TORCH_LAST,
    },
    "PolynomialLR": {"total_iters": _NUMBER, "power": _NUMBER, **_TORCH_LAST},
    "ReduceLROnPlateau": {
        "mode": Argument("choice", choices=("min", "max")), "factor": Argument("number", below=1),
        "patience": _NUMBER, "threshold": _NUMBER, "threshold_mode": Argument("choice", choices=("rel", "abs")),
        "cooldown": _ANY, "min_lr": _ANY, "eps": _ANY,
    },
    "StepLR": {"step_size": _DIVISOR, "gamma": _NUMBER, **_TORCH_LAST},
}  # fmt: skip
"""torch.optim.lr_scheduler's that JSON can set up."""
