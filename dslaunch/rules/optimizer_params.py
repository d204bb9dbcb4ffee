"""The parameters that a DeepSpeed JSON hands to its optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dslaunch.errors import nearest
from dslaunch.rules.config import ZERO, Config, config_rule
from dslaunch.rules.registry import Hit
from dslaunch.rules.torch_arguments import OPTIMIZERS, Argument
from dslaunch.rules.values import is_text, shown

_ENGINE = "deepspeed/runtime/engine.py"
_OF_DEEPSPEED = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
"""Read by DeepSpeed itself, and not handed over."""
_ADAM = {"lr", "betas", "eps", "weight_decay", "amsgrad", "bias_correction", "set_grad_none", *_OF_DEEPSPEED}
_OWN = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "lion": {"lr", "betas", "weight_decay", "set_grad_none", "fp32_optimizer_states"},
    "lamb": {
        "lr", "bias_correction", "betas", "eps", "eps_inside_sqrt", "weight_decay", "max_coeff", "min_coeff",
        "amsgrad",
    },
}  # fmt: skip
"""Keyword arguments of DeepSpeed's own (0.19.8)."""
_NUMBER = Argument("number")
_OWN_ADAM = {"lr": _NUMBER, "betas": Argument("pair"), "eps": _NUMBER, "weight_decay": _NUMBER}
"""What FusedAdam computes with: it checks no range."""
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
            written = config.get("optimizer.type")
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
    """What is known of the values: of torch's classes, and of DeepSpeed's Adam on the GPU."""
    if config.optimizer in ("adam", "adamw") and not config.get("optimizer.params.torch_adam"):
        return _OWN_ADAM
    return OPTIMIZERS.get(torch_class(config), {})


def _keywords(config: Config) -> set[str]:
    """The keyword arguments that the optimizer takes; empty where they aren't known."""
    torch = torch_class(config)
    if torch and config.optimizer in ("adam", "adamw"):
        return set(OPTIMIZERS[torch]) | _OF_DEEPSPEED
    return set(OPTIMIZERS[torch]) if torch else _OWN.get(config.optimizer, set())


def _together(config: Config, params: dict[str, Any]) -> Iterator[Hit]:
    """Parameters that exclude or need each other."""
    torch, section = torch_class(config), "optimizer.params"
    if torch == "SGD" and params.get("nesterov") and (not params.get("momentum") or params.get("dampening")):
        message = "nesterov without momentum, or with dampening: torch's SGD raises ValueError."
        yield config.hit(f"{section}.nesterov", message, 'Give "momentum": 0.9 and no dampening.')
    if torch and params.get("fused") and params.get("foreach") and "fused" in OPTIMIZERS[torch]:
        message = f"fused and foreach together: torch's {torch} raises RuntimeError."
        yield config.hit(f"{section}.fused", message, "Keep one of the two.")
    if params.get("amsgrad") is True and _is_fused_adam(config):
        message = "amsgrad: DeepSpeed's FusedAdam raises RuntimeError, it has no such variant."
        yield config.hit(f"{section}.amsgrad", message, 'Take it out, or write "torch_adam": true.')
    if params.get("torch_adam") and _has_zenflow(config):
        message = "torch_adam beside zenflow: ZenFlow's own AdamW doesn't know it, TypeError at start-up."
        yield config.hit(f"{section}.torch_adam", message, "Take it out.")


def _has_zenflow(config: Config) -> bool:
    """Whether ZenFlow's optimizer takes the place of the one that is named."""
    zenflow = isinstance(config.get(f"{ZERO}.zenflow"), dict)
    return zenflow and config.stage in (1, 2) and config.optimizer in ("adam", "adamw") and _on_cpu(config)


def _on_cpu(config: Config) -> bool:
    return config.sharded and config.offload("optimizer") != "none"


def _is_fused_adam(config: Config) -> bool:
    own = config.optimizer in ("adam", "adamw") and not config.get("optimizer.params.torch_adam")
    return own and not _on_cpu(config)
