"""The optimizer that a DeepSpeed JSON names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dslaunch.errors import nearest
from dslaunch.rules.deepspeed.config import ZERO, Config, config_rule
from dslaunch.rules.registry import Hit

_ENGINE = "deepspeed/runtime/engine.py"
_OWN = frozenset({"adam", "adamw", "adagrad", "lamb", "lion", "muon", "muadam", "muadamw", "musgd"})
_ONE_BIT = frozenset({"onebitadam", "onebitlamb", "zerooneadam"})
_TORCH = frozenset({
    "ASGD", "Adadelta", "Adafactor", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
})  # fmt: skip
"""torch.optim's (2.13), without those that DeepSpeed has under the same name."""
_PREFIX = re.compile(r"^(?:DeepSpeed)?(?:Fused|CPU)")
"""Of the classes that DeepSpeed takes for a name by itself."""
_ZERO_TESTED = frozenset({"adam", "adamw", "adagrad", "lion", "muon"})
_CPU = frozenset({"adam", "adamw", "adagrad", "lion", "muon"})
_NO_STEP = {
    "LBFGS": "its step needs a closure, which DeepSpeed doesn't pass (TypeError)",
    "SparseAdam": "it takes sparse gradients alone, and DeepSpeed's are dense (RuntimeError)",
}


@config_rule(
    "optimizer.type", severity="error", raised_by="deepspeed.initialize",
    evidence=f"{_ENGINE} _do_sanity_check 0.19.8, run; DeepSpeed#4187, #8489",
)  # fmt: skip
def unknown_type(config: Config) -> Iterator[Hit]:
    """An optimizer that neither DeepSpeed nor torch.optim has under this name, or that DeepSpeed can't step."""
    name = config.optimizer
    if name in _NO_STEP:
        message = f"torch's {name} raises in the first step: {_NO_STEP[name]}."
        yield config.hit("optimizer.type", message, "Use AdamW.")
    if not name or name in _OWN or name in _TORCH or (name in _ONE_BIT and not config.at_least("0.19.7")):
        return
    written = config.get("optimizer.type")
    if name in _ONE_BIT:
        message = f"{written} was removed in DeepSpeed 0.19.7, which asserts that it is no supported optimizer."
        yield config.hit("optimizer.type", message, "Use AdamW or Lamb.")
        return
    plain = _PREFIX.sub("", written)
    guess = f" Did you mean '{plain}'?" if plain.lower() in _OWN else nearest(written, _OWN | _TORCH)
    message = f"no optimizer is called {written!r} (torch's names count letter by letter).{guess}"
    fix = "Use AdamW, Adam, Adagrad, Lamb, Lion, Muon, or the exact name of a class in torch.optim."
    yield config.hit("optimizer.type", f"{message} DeepSpeed asserts at start-up.", fix)


@config_rule(
    "optimizer.none", severity="wrong",
    evidence=f"{_ENGINE} _configure_optimizer, runtime/config.py get_optimizer_name 0.19.8, run",
)  # fmt: skip
def no_type(config: Config) -> Iterator[Hit]:
    """An optimizer section that names no optimizer."""
    if isinstance(config.get("optimizer"), dict) and config.get("optimizer.type") is None:
        effect = (
            "ZeRO 1 and 2 assert that there is one" if config.stage in (1, 2) else "nothing is ever updated"
        )
        message = f"the optimizer section has no type, so DeepSpeed makes no optimizer: {effect}"
        yield config.hit(
            "optimizer", f"{message}, unless the script passes its own.", 'Write "type": "AdamW".'
        )


@config_rule(
    "optimizer.untested", severity="error", raised_by="deepspeed.initialize",
    evidence=f"{_ENGINE} _do_optimizer_sanity_check, runtime/zero/utils.py 0.19.8, run; DeepSpeed#4187",
)  # fmt: skip
def untested(config: Config) -> Iterator[Hit]:
    """An optimizer that ZeRO takes only with zero_allow_untested_optimizer."""
    name = config.optimizer
    known = name in _OWN | _TORCH
    if (
        config.sharded
        and known
        and name not in _ZERO_TESTED
        and not config.get("zero_allow_untested_optimizer")
    ):
        message = (
            f"{config.get('optimizer.type')} with ZeRO stage {config.stage}: DeepSpeed "
            "asserts that it is tested"
        )
        fix = 'Write "zero_allow_untested_optimizer": true, or use AdamW.'
        yield config.hit("optimizer.type", f"{message} with ZeRO, and it isn't.", fix)


@config_rule(
    "optimizer.lamb-scale", severity="error", raised_by="deepspeed.initialize",
    evidence=f"{_ENGINE} _do_sanity_check 0.19.8, run",
)  # fmt: skip
def lamb_scale(config: Config) -> Iterator[Hit]:
    """Lamb with a fixed loss scale."""
    if config.optimizer == "lamb" and config.number("fp16.loss_scale"):
        message = (
            f"Lamb with fp16.loss_scale {config.number('fp16.loss_scale'):g}: DeepSpeed "
            "asserts dynamic scaling."
        )
        yield config.hit("fp16.loss_scale", message, "Write 0, which is dynamic.")


@config_rule(
    "optimizer.muon", severity="error", raised_by="deepspeed.initialize", since="0.18.9",
    evidence="deepspeed/runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3.__init__ 0.19.8, run",
)  # fmt: skip
def muon(config: Config) -> Iterator[Hit]:
    """Muon at ZeRO-3 with reduce-scatter, which is on unless it is switched off."""
    if config.optimizer == "muon" and config.stage == 3:
        if not config.off(f"{ZERO}.reduce_scatter"):
            message = (
                "Muon at ZeRO stage 3 with reduce_scatter (true unless given): DeepSpeed raises ValueError."
            )
            yield config.hit(f"{ZERO}.reduce_scatter", message, 'Write "reduce_scatter": false.')
        if config.on(f"{ZERO}.zero_quantized_gradients"):
            message = "Muon at ZeRO stage 3 with zero_quantized_gradients: DeepSpeed raises ValueError."
            yield config.hit(
                f"{ZERO}.zero_quantized_gradients", message, "Leave zero_quantized_gradients out."
            )


@config_rule(
    "optimizer.muon-rates", severity="info", since="0.18.9",
    evidence=f"{_ENGINE} _muon_param_groups 0.19.8, run",
)  # fmt: skip
def muon_rates(config: Config) -> Iterator[Hit]:
    """One learning rate for Muon's matrices and for what Adam steps beside them."""
    params = "optimizer.params"
    given = config.has(f"{params}.muon_lr") or config.has(f"{params}.adam_lr")
    if config.optimizer == "muon" and config.number(f"{params}.lr") and not given:
        message = "lr is that of Muon's matrices, and of embeddings, norms and biases, which Adam steps."
        yield config.hit(f"{params}.lr", message, "Give muon_lr and adam_lr where they are to differ.")


@config_rule(
    "optimizer.decay", severity="info",
    evidence=f"{_ENGINE} _configure_basic_optimizer, runtime/config.py ADAM_W_MODE_DEFAULT 0.19.8",
)  # fmt: skip
def decay(config: Config) -> Iterator[Hit]:
    """`Adam` with weight decay, which DeepSpeed runs as AdamW."""
    given = config.has("optimizer.params.adam_w_mode")
    if config.optimizer == "adam" and config.number("optimizer.params.weight_decay") and not given:
        message = (
            "Adam with weight_decay runs as AdamW (decoupled decay): adam_w_mode is true unless it is given."
        )
        yield config.hit("optimizer.type", message, 'Write AdamW, or "adam_w_mode": false for L2 decay.')


@config_rule(
    "optimizer.cpu", severity="slow",
    evidence=f"{_ENGINE} get_optimizer_configuration, ops/adam/cpu_adam.py 0.19.8, run",
)  # fmt: skip
def on_cpu(config: Config) -> Iterator[Hit]:
    """Offload to the CPU with an optimizer that has no fast CPU version there."""
    if config.offload("optimizer") == "none" or not config.sharded or not config.optimizer:
        return
    torch_adam = bool(config.get("optimizer.params.torch_adam"))
    if config.optimizer not in _CPU or torch_adam:
        what = "torch_adam" if torch_adam else config.get("optimizer.type")
        message = f"offload_optimizer with {what}: torch's own step runs on the CPU, many times slower."
        yield config.hit("optimizer.type", message, "Use Adam or AdamW without torch_adam.")
    elif config.optimizer in ("adam", "adamw") and config.get("optimizer.params.amsgrad"):
        message = "amsgrad with offload_optimizer: DeepSpeedCPUAdam raises RuntimeError."
        yield config.hit(
            "optimizer.params.amsgrad",
            message,
            "Write false.",
            severity="error",
            raised_by="deepspeed.initialize",
        )


@config_rule("optimizer.package", severity="info", evidence=f"{_ENGINE} _configure_basic_optimizer 0.19.8, run")
def package(config: Config) -> Iterator[Hit]:
    """An optimizer of the package mup, which DeepSpeed doesn't bring along."""
    if config.optimizer in ("muadam", "muadamw", "musgd"):
        name = config.get("optimizer.type")
        message = f"{name} is of the package mup: without it UnboundLocalError at start-up."
        yield config.hit("optimizer.type", message, "Install mup in the training environment.")
