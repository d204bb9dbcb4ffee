"""What the command lines of Megatron-LM and Megatron-DeepSpeed have in common: names and meanings alike."""

from __future__ import annotations

import shlex

from dslaunch.errors import ConfigError
from dslaunch.planfile import ComponentPlan, Plan
from dslaunch.render.megatron_flags import Flags, flags, one_line
from dslaunch.schema.model import Decoder


def sizes(name: str, decoder: Decoder, seq_len: int) -> Flags:
    """Layers and widths; positions that are rotated or learned are the forks' own.

    Raises:
        ConfigError: a longer sequence than the model has positions.
    """
    key = f"model.components.{name}"
    if seq_len > decoder.max_positions:
        raise ConfigError(
            f"training.seq_len is {seq_len}, but {key}.max_positions is {decoder.max_positions}: Megatron stops "
            "there. Shorten the sequence, or raise max_positions"
        )
    return flags(
        num_layers=decoder.layers,
        hidden_size=decoder.hidden,
        ffn_hidden_size=decoder.ffn,
        num_attention_heads=decoder.heads,
        swiglu=decoder.gated_mlp,
        untie_embeddings_and_output_weights=not decoder.tied_embeddings,
        seq_length=seq_len,
        max_position_embeddings=decoder.max_positions,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )


def whole_base(name: str, decoder: Decoder, flag: str) -> int:
    """The base of rotary positions, which both parsers take as a whole number (`flag`)."""
    if decoder.rope_theta != int(decoder.rope_theta):
        raise ConfigError(
            f"model.components.{name}.rope_theta is {decoder.rope_theta}: Megatron's {flag} takes whole "
            "numbers only. Round it yourself, or take another engine"
        )
    return int(decoder.rope_theta)


def batch_and_schedule(plan: Plan, component: ComponentPlan) -> Flags:
    """Batch, steps, optimizer, learning rate; a validation is never run."""
    training = plan.training
    if training.warmup_steps >= training.steps:
        raise ConfigError(
            f"training.optimizer.warmup_steps is {training.warmup_steps}, training.steps {training.steps}: "
            "Megatron needs a step after the warm-up. Shorten the warm-up"
        )
    return flags(
        micro_batch_size=component.micro_batch,
        global_batch_size=plan.global_batch,
        train_iters=training.steps,
        optimizer="adam",
        lr=component.lr,
        min_lr=training.min_lr,
        lr_decay_style={"wsd": "WSD"}.get(training.lr_schedule, training.lr_schedule),
        lr_decay_iters=training.steps,
        lr_warmup_iters=training.warmup_steps,
        lr_wsd_decay_iters=training.lr_decay_steps or None,
        lr_wsd_decay_style={"sqrt": "minus_sqrt"}.get(training.lr_decay_shape, training.lr_decay_shape) or None,
        adam_beta1=training.betas[0],
        adam_beta2=training.betas[1],
        adam_eps=training.eps,
        weight_decay=component.weight_decay,
        clip_grad=training.clip,
        seed=training.seed,
        eval_iters=0,
        eval_interval=training.steps,
    )


def data(plan: Plan) -> Flags:
    """Prefixes and weights as Megatron takes them; a path with a space is quoted in data.path."""
    if not plan.files.data_path:
        return {}
    prefixes = tuple(shlex.quote(one_line(word)) for word in _prefixes(plan.files.data_path))
    return {"--data-path": prefixes, "--split": ("100,0,0",)}


def _prefixes(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"data.path is {text!r}: {error}. Close the quotes, or quote the whole path"
        ) from error


def full_or_selective(component: ComponentPlan) -> Flags:
    """Recompute, layer by layer or of attention's core."""
    if component.recompute == "full":
        return flags(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return flags(recompute_activations=component.recompute == "selective")
