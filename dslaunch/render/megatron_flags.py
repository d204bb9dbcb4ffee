"""Flags of Megatron's pretrain scripts: how they are written, and what the script's own parser would say."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from dslaunch.engines.megatron_catalogue import Argument, Catalogue
from dslaunch.errors import ConfigError, listed, nearest

Flags = dict[str, tuple[str, ...]]
"""Flag with its dashes -> its values as shell words."""

DECIDED = {
    "--tensor-model-parallel-size": "strategy.COMPONENT.tp",
    "--pipeline-model-parallel-size": "strategy.COMPONENT.pp",
    "--no-pipeline-parallel": "strategy.COMPONENT.pp",
    "--num-virtual-stages-per-pipeline-rank": "strategy.COMPONENT.vpp",
    "--num-layers-per-virtual-pipeline-stage": "strategy.COMPONENT.vpp",
    "--pipeline-model-parallel-layout": "strategy.COMPONENT.layers_per_stage",
    "--decoder-first-pipeline-num-layers": "strategy.COMPONENT.layers_per_stage",
    "--decoder-last-pipeline-num-layers": "strategy.COMPONENT.layers_per_stage",
    "--account-for-embedding-in-pipeline-split": "strategy.COMPONENT.layers_per_stage",
    "--account-for-loss-in-pipeline-split": "strategy.COMPONENT.layers_per_stage",
    "--context-parallel-size": "strategy.COMPONENT.cp",
    "--ds-sequence-parallel-size": "strategy.COMPONENT.cp",
    "--expert-model-parallel-size": "strategy.COMPONENT.ep",
    "--expert-tensor-parallel-size": "strategy.COMPONENT.etp",
    "--use-distributed-optimizer": "strategy.COMPONENT.zero",
    "--zero-stage": "strategy.COMPONENT.zero",
    "--cpu-optimizer": "strategy.COMPONENT.offload",
    "--sequence-parallel": "training.sequence_parallel",
    "--micro-batch-size": "training.micro_batch",
    "--global-batch-size": "training.global_batch",
    "--seq-length": "training.seq_len",
    "--bf16": "training.precision",
    "--fp16": "training.precision",
    "--accumulate-allreduce-grads-in-fp32": "training.grad_accum_dtype",
    "--grad-reduce-in-bf16": "training.grad_accum_dtype",
    "--overlap-grad-reduce": "training.overlap_comm",
    "--overlap-param-gather": "training.overlap_comm",
    "--enable-zbh1-pipeline": "training.schedule",
    "--train-iters": "training.steps",
    "--seed": "training.seed",
    "--clip-grad": "training.clip",
    "--lr": "training.optimizer.lr",
    "--min-lr": "training.optimizer.min_lr",
    "--lr-decay-style": "training.optimizer.schedule",
    "--lr-warmup-iters": "training.optimizer.warmup_steps",
    "--lr-wsd-decay-iters": "training.optimizer.decay_steps",
    "--lr-wsd-decay-style": "training.optimizer.decay_shape",
    "--adam-beta1": "training.optimizer.betas",
    "--adam-beta2": "training.optimizer.betas",
    "--adam-eps": "training.optimizer.eps",
    "--weight-decay": "training.optimizer.weight_decay",
    "--recompute-granularity": "strategy.COMPONENT.recompute",
    "--recompute-activations": "strategy.COMPONENT.recompute",
    "--num-layers": "model.components.COMPONENT.layers",
    "--hidden-size": "model.components.COMPONENT.hidden",
    "--ffn-hidden-size": "model.components.COMPONENT.ffn",
    "--num-attention-heads": "model.components.COMPONENT.heads",
    "--num-query-groups": "model.components.COMPONENT.kv_heads",
    "--num-key-value-heads": "model.components.COMPONENT.kv_heads",
    "--padded-vocab-size": "model.components.COMPONENT.vocab",
    "--make-vocab-size-divisible-by": "model.components.COMPONENT.vocab",
    "--group-query-attention": "model.components.COMPONENT.kv_heads",
    "--kv-channels": "model.components.COMPONENT.head_dim",
    "--qk-layernorm": "model.components.COMPONENT.qk_norm",
    "--window-size": "model.components.COMPONENT.window",
    "--window-attn-skip-freq": "model.components.COMPONENT.window",
    "--swiglu": "model.components.COMPONENT.gated_mlp",
    "--normalization": "model.components.COMPONENT.norm",
    "--norm-epsilon": "model.components.COMPONENT.norm_eps",
    "--layernorm-epsilon": "model.components.COMPONENT.norm_eps",
    "--add-qkv-bias": "model.components.COMPONENT.qkv_bias",
    "--disable-bias-linear": "model.components.COMPONENT.mlp_bias",
    "--untie-embeddings-and-output-weights": "model.components.COMPONENT.tied_embeddings",
    "--position-embedding-type": "model.components.COMPONENT.position",
    "--use-rotary-position-embeddings": "model.components.COMPONENT.position",
    "--rotary-base": "model.components.COMPONENT.rope_theta",
    "--rotary-position-embeddings-theta": "model.components.COMPONENT.rope_theta",
    "--max-position-embeddings": "model.components.COMPONENT.max_positions",
    "--num-experts": "model.components.COMPONENT.experts.count",
    "--moe-router-topk": "model.components.COMPONENT.experts.top_k",
    "--moe-ffn-hidden-size": "model.components.COMPONENT.experts.ffn",
    "--moe-shared-expert-intermediate-size": "model.components.COMPONENT.experts.shared_ffn",
    "--moe-shared-expert-gate": "model.components.COMPONENT.experts.shared_gate",
    "--moe-layer-freq": "model.components.COMPONENT.experts.dense_layers",
    "--moe-router-enable-expert-bias": "model.components.COMPONENT.experts.router_bias",
    "--moe-router-num-groups": "model.components.COMPONENT.experts.n_group",
    "--moe-router-group-topk": "model.components.COMPONENT.experts.topk_group",
    "--moe-router-topk-scaling-factor": "model.components.COMPONENT.experts.routed_scaling_factor",
    "--multi-latent-attention": "model.components.COMPONENT.mla",
    "--q-lora-rank": "model.components.COMPONENT.mla.q_lora_rank",
    "--kv-lora-rank": "model.components.COMPONENT.mla.kv_lora_rank",
    "--qk-head-dim": "model.components.COMPONENT.mla.qk_nope_head_dim",
    "--qk-pos-emb-head-dim": "model.components.COMPONENT.mla.qk_rope_head_dim",
    "--v-head-dim": "model.components.COMPONENT.mla.v_head_dim",
    "--mtp-num-layers": "model.components.COMPONENT.mtp_layers",
    "--data-path": "data.path",
    "--save": "checkpoint.dir",
    "--save-interval": "checkpoint.every",
    "--load": "checkpoint.load",
    "--distributed-timeout-minutes": "launcher.timeout_minutes",
    "--encoder-tp": "strategy.COMPONENT.tp",
    "--encoder-dp": "strategy.COMPONENT.dp",
    "--llm-offset": "strategy.COMPONENT.rank_offset",
    "--llm-tp": "strategy.COMPONENT.tp",
    "--llm-cp": "strategy.COMPONENT.cp",
    "--llm-pp": "strategy.COMPONENT.pp",
    "--llm-dp": "strategy.COMPONENT.dp",
    "--llm-ep": "strategy.COMPONENT.ep",
    "--llm-expt-tp": "strategy.COMPONENT.etp",
    "--freeze-vit": "model.components.COMPONENT.train",
    "--freeze-projection": "model.components.COMPONENT.train",
    "--freeze-lm": "model.components.COMPONENT.train",
    "--deepspeed": "engine",
    "--deepspeed_config": "engine",
}
"""Flags that the plan decides, and the key of dslaunch that sets each."""

_NUMBERS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float)}


def flags(**values: object) -> Flags:
    """Keyword arguments as flags: True is a flag alone, None and False are left out."""
    named = {f"--{key.replace('_', '-')}": value for key, value in values.items()}
    return {
        flag: () if value is True else (shlex.quote(one_line(value)),)
        for flag, value in named.items()
        if value is not None and value is not False
    }


def one_line(value: object) -> str:
    """`value` as text; raises ConfigError where it holds a newline."""
    text = str(value)
    if "\n" in text:
        raise ConfigError(f"{text!r}: a value of megatron_args.txt is one line of text; take the newline out")
    return text


def first_known(catalogue: Catalogue, *alternatives: Flags) -> Flags:
    """The first of `alternatives` whose flags the version has; the first of all where it has none."""
    known = (each for each in alternatives if each.keys() <= catalogue.arguments.keys())
    return next(known, alternatives[0])


def require_known(made: Flags, catalogue: Catalogue) -> None:
    """Raise ConfigError where the version's parser would refuse one of `made`, naming versions that have it."""
    for flag, words in made.items():
        argument = catalogue.arguments.get(flag)
        if argument is None:
            elsewhere = catalogue.others_with(flag)
            have = f"versions that have it: {elsewhere}; set engine.version to one of them" if elsewhere else ""
            raise ConfigError(
                f"{DECIDED.get(flag, flag)}: {catalogue.framework} has no flag {flag}; "
                f"{have or 'take another engine'}"
            )
        _require_values(flag, [shlex.split(word)[0] for word in words], argument, catalogue)


def _require_values(flag: str, values: Sequence[str], argument: Argument, catalogue: Catalogue) -> None:
    wanted = {"": 1, "*": None, "+": None}.get(argument.nargs, argument.nargs)
    assert wanted is None or len(values) == int(wanted), f"{flag} takes {wanted} values, found {values}"
    for value in values:
        if argument.type in _NUMBERS:
            assert not isinstance(_number(value, argument.type), str), f"{flag} {value} is no {argument.type}"
        if argument.choices and value not in map(str, argument.choices):
            raise ConfigError(
                f"{DECIDED.get(flag, flag)}: {flag} {value}, but {catalogue.framework} takes "
                f"{listed(argument.choices)}. Set engine.version to another version, or take another engine"
            )


def _number(value: str, kind: str) -> int | float | str:
    try:
        return int(value) if kind == "int" else float(value)
    except ValueError:
        return value


def merge_extra(made: Flags, extra: Mapping[str, Any], catalogue: Catalogue) -> Flags:
    """`made` with engine.extra (flag without dashes -> value) laid over it.

    Raises:
        ConfigError: a flag that the version does not know, a value that it would refuse, or a flag that the
            plan decides.
    """
    merged = dict(made)
    for name, value in extra.items():
        flag = f"--{name}"
        if decider := DECIDED.get(flag):
            raise ConfigError(f"engine.extra.{name}: the plan decides this flag. Set {decider} instead")
        if flag not in catalogue.arguments:
            raise ConfigError(_unknown(name, catalogue))
        merged[flag] = tuple(shlex.quote(text) for text in _values(name, value, catalogue.arguments[flag]))
    return merged


def _unknown(name: str, catalogue: Catalogue) -> str:
    start = f"engine.extra.{name}: {catalogue.framework} has no flag --{name}; its parser would stop."
    if elsewhere := catalogue.others_with(f"--{name}"):
        return f"{start} Versions that have it: {elsewhere}; set engine.version to one of them"
    hint = nearest(name, [each.removeprefix("--") for each in catalogue.arguments])
    return (
        f"{start}{hint} Write a flag without its leading dashes, such as engine.extra.log-params-norm=true"
    )


def _values(name: str, value: Any, argument: Argument) -> list[str]:
    if argument.nargs == "0":
        if value is not True:
            raise ConfigError(
                f"engine.extra.{name} is {value!r}: the flag takes no value. Write true, or leave the key out"
            )
        return []
    values = list(value) if isinstance(value, list | tuple) else [value]
    exact = {"": 1, "*": None, "+": None}.get(argument.nargs, argument.nargs)
    if exact is not None and len(values) != int(exact):
        raise ConfigError(
            f"engine.extra.{name} is {value!r}: Megatron takes {exact} value(s) here, not {len(values)}"
        )
    for each in values:
        _check_value(name, each, argument)
    return [str(each) for each in values]


def _check_value(name: str, value: Any, argument: Argument) -> None:
    numbers = _NUMBERS.get(argument.type)
    if numbers and type(value) not in numbers:
        raise ConfigError(
            f"engine.extra.{name} is {value!r}: Megatron takes a number of type {argument.type}"
        )
    if argument.choices and value not in argument.choices:
        raise ConfigError(
            f"engine.extra.{name} is {value!r}: allowed are {listed(argument.choices)}."
            f"{nearest(str(value), map(str, argument.choices))}"
        )
    if isinstance(value, bool | dict) or value is None or "\n" in str(value):
        raise ConfigError(f"engine.extra.{name} is {value!r}: one line of text or a number is expected")
