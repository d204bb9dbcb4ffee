"""The parameters that a DeepSpeed JSON hands to its optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dslaunch.errors import nearest
from dslaunch.rules.deepspeed.config import ZERO, Config, config_rule
from dslaunch.rules.deepspeed.torch_arguments import OPTIMIZERS, OWN_OPTIMIZERS, Argument
from dslaunch.rules.deepspeed.values import is_text, shown
from dslaunch.rules.registry import Hit

_ENGINE = "deepspeed/runtime/engine.py"
_OF_DEEPSPEED = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
"""Read by DeepSpeed itself, and not handed over."""
_OF_ADAM = (_OF_DEEPSPEED - {"torch_adam"}) | {"adamw_mode"}
"""What Adam's own classes get from DeepSpeed, and a file must not hand over a second time."""
_NUMBER = Argument("number")
_MUON = {
    **dict.fromkeys(("lr", "muon_lr", "adam_lr", "momentum", "eps", "weight_decay"), _NUMBER),
    "betas": Argument("pair"), "ns_method": Argument("choice", choices=("standard", "gram")),
}  # fmt: skip
"""Muon's, of which each half reads its own, and what is in neither is passed over."""
_NUMBERS = frozenset({"lr", "eps", "betas", "weight_decay", "momentum", "alpha"})
"""Parameters that every optimizer compares or computes with."""


def torch_class(config: Config) -> str:
    """The class of torch.optim that DeepSpeed takes; empty for DeepSpeed's own, and for those it can't step."""
    name = config.optimizer
    if name in ("adam", "adamw") and config.get("optimizer.params.torch_adam"):
        plain = name == "adam" and config.get("optimizer.params.adam_w_mode") in (False, 0)
        return "Adam" if plain else "AdamW"
    if name == "adagrad" and not _on_cpu(config):
        return "Adagrad"
    return name if name in OPTIMIZERS else ""


def own_class(config: Config) -> str:
    """DeepSpeed's own class that is built of the parameters; empty where it is torch's or another one."""
    cpu = _on_cpu(config)
    if config.get("optimizer.params.torch_adam") and config.optimizer in ("adam", "adamw"):
        return ""
    return _CLASSES.get((config.optimizer, cpu), "")


_CLASSES = {
    **dict.fromkeys((("adam", True), ("adamw", True)), "DeepSpeedCPUAdam"),
    **dict.fromkeys((("adam", False), ("adamw", False)), "FusedAdam"),
    ("adagrad", True): "DeepSpeedCPUAdagrad",
    ("lion", True): "DeepSpeedCPULion",
    ("lion", False): "FusedLion",
    ("lamb", True): "FusedLamb",
    ("lamb", False): "FusedLamb",
}
"""By name, and by whether the optimizer is offloaded to the CPU."""


@config_rule(
    "optimizer.params", severity="error", raised_by="deepspeed.initialize",
    evidence=f"{_ENGINE} _configure_basic_optimizer 0.19.8, run; torch 2.13; DeepSpeed#742",
)  # fmt: skip
def bad_params(config: Config) -> Iterator[Hit]:
    """A parameter that the optimizer doesn't take, or a value that it can't work with."""
    params = config.get("optimizer.params")
    if not isinstance(params, dict) or not config.optimizer:
        return
    arguments, taken = _arguments(config), _keywords(config)
    for name, value in params.items():
        key = f"optimizer.params.{name}"
        argument = arguments.get(name)
        if name == "max_grad_norm":
            message = "DeepSpeed raises ValueError for max_grad_norm among the optimizer's parameters."
            yield config.hit(key, message, "Use gradient_clipping at the top level.")
        elif taken and name not in taken:
            written = config.get("optimizer.type") + (" under zenflow" if _has_zenflow(config) else "")
            message = f"{written} takes no '{name}': TypeError when the optimizer is built.{nearest(name, taken)}"
            yield config.hit(key, message, f"Use {', '.join(sorted(taken))}.")
        elif name in _NUMBERS and is_text(value):
            message = f"'{name}' is text, {shown(value)}: TypeError when the optimizer is built."
            yield config.hit(key, message, "Write the number without quotes.")
        elif argument is not None and not argument.takes(value):
            written = config.get("optimizer.type")
            message = f"'{name}' is {shown(value)}; {written} takes {argument.words}, and raises."
            yield config.hit(key, message, f"Write {argument.words}.")
    yield from _together(config, params)


def _arguments(config: Config) -> Mapping[str, Argument]:
    """What is known of the values."""
    if config.optimizer == "muon":
        torch_adam = bool(config.get("optimizer.params.torch_adam"))
        return {**_MUON, "betas": Argument("pair", below=1)} if torch_adam else _MUON
    if _has_zenflow(config):
        both = OPTIMIZERS["AdamW"].keys() & OWN_OPTIMIZERS["DeepSpeedCPUAdam"].keys()
        return {name: OPTIMIZERS["AdamW"][name] for name in both}
    own = own_class(config)
    return OWN_OPTIMIZERS[own] if own else OPTIMIZERS.get(torch_class(config), {})


def _keywords(config: Config) -> set[str]:
    """The keyword arguments that the optimizer takes; empty where they aren't known, or nothing is refused."""
    if config.optimizer == "muon":
        return set()
    taken, adam = set(_arguments(config)), config.optimizer in ("adam", "adamw")
    return (taken - _OF_ADAM) | _OF_DEEPSPEED if taken and adam and not _has_zenflow(config) else taken


def _together(config: Config, params: dict[str, Any]) -> Iterator[Hit]:
    """Parameters that exclude or need each other."""
    torch, section = torch_class(config), "optimizer.params"
    if torch == "SGD" and params.get("nesterov") and (not params.get("momentum") or params.get("dampening")):
        message = "nesterov without momentum, or with dampening: torch's SGD raises ValueError."
        yield config.hit(f"{section}.nesterov", message, 'Give "momentum": 0.9 and no dampening.')
    if torch and params.get("fused") and params.get("foreach") and "fused" in OPTIMIZERS[torch]:
        message = f"fused and foreach together: torch's {torch} raises RuntimeError."
        yield config.hit(f"{section}.fused", message, "Keep one of the two.")
    own = own_class(config)
    if params.get("amsgrad") and own in ("FusedAdam", "FusedLamb"):
        message = f"amsgrad: DeepSpeed's {own} raises RuntimeError, it has no such variant."
        fix = 'Take it out, or write "torch_adam": true.' if own == "FusedAdam" else "Take it out."
        yield config.hit(f"{section}.amsgrad", message, fix)


def _has_zenflow(config: Config) -> bool:
    """Whether ZenFlow hands the parameters to an AdamW of torch's too, as they stand."""
    zenflow = isinstance(config.get(f"{ZERO}.zenflow"), dict)
    return zenflow and config.stage in (1, 2) and config.optimizer in ("adam", "adamw") and _on_cpu(config)


def _on_cpu(config: Config) -> bool:
    return config.sharded and config.offload("optimizer") != "none"
