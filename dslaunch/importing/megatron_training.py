"""Layout, training and files from Megatron's flags.

Defaults of flags that are absent: megatron/training/arguments.py of NVIDIA/Megatron-LM at core_v0.16.0.
"""

from __future__ import annotations

from typing import Any

from dslaunch.engines import megatron_deepspeed
from dslaunch.engines.versions import executing
from dslaunch.errors import ConfigError
from dslaunch.importing.megatron_flags import Flags
from dslaunch.importing.recipe import Recipe

_STYLES = ("constant", "linear", "cosine", "WSD")
_COUNTED = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
_SHAPES = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt"}
"""--lr-wsd-decay-style -> training.optimizer.decay_shape."""


def take_layout(recipe: Recipe, flags: Flags, component: str) -> int:
    """Puts the component's layout, by number of GPUs where the cluster's name tells it; a replica's ranks."""
    tp = flags.number("--tensor-model-parallel-size") or 1
    pp = flags.number("--pipeline-model-parallel-size") or 1
    distributed, stage = flags.on("--use-distributed-optimizer"), flags.number("--zero-stage")
    layout: dict[str, Any] = {"tp": tp, "pp": pp, "zero": int(distributed) if stage is None else stage}
    layers = flags.peek("--num-layers") or 0
    counted = [flags.on(flag) for flag in _COUNTED]
    if vpp := _virtual_stages(flags, layers + sum(counted), pp):
        layout["vpp"] = vpp
        recipe.put("training.schedule", "interleaved")
    if flags.on("--enable-zbh1-pipeline") and pp > 1:
        version = executing(megatron_deepspeed.ENGINE, "zb-h1")
        recipe.put("training.schedule", "zb-h1")
        recipe.put("engine.version", version)
        flags.note("--enable-zbh1-pipeline", f"engine.version is {version}, the last whose pipeline runs it")
    for flag, key in (("--context-parallel-size", "cp"), ("--expert-model-parallel-size", "ep")):
        degree = flags.number(flag)
        if degree and degree > 1:
            layout[key] = degree
    expert_tp = flags.number("--expert-tensor-parallel-size")
    if expert_tp and expert_tp != tp:
        layout["etp"] = expert_tp
    layout["recompute"] = _recompute(flags)
    if stages := _uneven_stages(flags, layers, pp) or _counted_stages(flags, layers, pp, counted):
        layout["layers_per_stage"] = stages
    shared = flags.on("--sequence-parallel")
    if shared and tp == 1:
        flags.note("--sequence-parallel", "Megatron turns it off where tp is 1")
    recipe.put("training.sequence_parallel", shared or tp == 1)
    if recipe.gpus:
        recipe.tree["layouts"] = {recipe.gpus: {component: layout}}
    else:
        for key, value in layout.items():
            recipe.put(f"strategy.{component}.{key}", value)
    return tp * pp * int(layout.get("cp", 1))


def _virtual_stages(flags: Flags, layers: int, pp: int) -> int | None:
    vpp = flags.number("--num-virtual-stages-per-pipeline-rank")
    per_part = flags.number("--num-layers-per-virtual-pipeline-stage")
    if per_part:
        vpp = layers // pp // per_part
        flags.note(
            "--num-layers-per-virtual-pipeline-stage",
            f"{layers} layers / {pp} stages / {per_part}: --num-virtual-stages-per-pipeline-rank {vpp} is written",
        )
    return vpp if vpp and vpp > 1 else None


def _recompute(flags: Flags) -> str:
    granularity, selective = flags.text("--recompute-granularity"), flags.on("--recompute-activations")
    if granularity == "full":
        method, layers = flags.text("--recompute-method"), flags.number("--recompute-num-layers")
        if method == "block" or (layers or 1) != 1:
            flags.note(
                "--recompute-method",
                f"{method}, {layers} layers: every layer is recomputed by itself (uniform, 1)",
            )
        return "full"
    return "selective" if granularity or selective else "none"


def _uneven_stages(flags: Flags, layers: int, pp: int) -> list[int] | None:
    first = flags.number("--decoder-first-pipeline-num-layers")
    last = flags.number("--decoder-last-pipeline-num-layers")
    if first is None and last is None:
        return None
    between = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if between < 1 or rest % between:
        raise ConfigError(
            f"{flags.where}: {rest} layers do not fill the {between} stages in between equally."
        )
    middle = rest // between
    inner = [middle] * (pp - 2)
    return [first if first is not None else middle, *inner, last if last is not None else middle]


def _counted_stages(flags: Flags, layers: int, pp: int, counted: list[bool]) -> list[int] | None:
    """Layers of equal stages of which the first holds the embedding as one more, and the last the loss."""
    if not any(counted):
        return None
    if (layers + sum(counted)) % pp:
        raise ConfigError(
            f"{flags.where}: {layers} layers and {sum(counted)} of {', '.join(_COUNTED)} do not fill {pp} stages "
            "equally."
        )
    stages = [(layers + sum(counted)) // pp] * pp
    stages[0] -= counted[0]
    stages[-1] -= counted[1]
    return stages


def take_training(recipe: Recipe, flags: Flags, replica: int) -> None:
    """Batch, precision, optimizer and schedule; `replica` is the number of ranks that hold one."""
    _batch(recipe, flags, replica)
    _precision(recipe, flags)
    recipe.put("training.clip", flags.real("--clip-grad") if "--clip-grad" in flags.left else 1.0)
    recipe.put("training.seed", flags.number("--seed") or 1234)
    overlap = flags.on("--overlap-grad-reduce")
    if flags.on("--overlap-param-gather") and not overlap:
        flags.note("--overlap-param-gather", "needs --overlap-grad-reduce; training.overlap_comm sets both")
    recipe.put("training.overlap_comm", overlap)
    _optimizer(recipe, flags)


def _batch(recipe: Recipe, flags: Flags, replica: int) -> None:
    """Without --global-batch-size Megatron takes one micro-batch of each replica."""
    micro, total = flags.number("--micro-batch-size"), flags.number("--global-batch-size")
    recipe.put("training.micro_batch", micro or 1)
    if total is None:
        if recipe.gpus is None:
            raise ConfigError(
                f"{flags.where}: --global-batch-size is missing. Add training.global_batch=128."
            )
        total = (micro or 1) * recipe.gpus // replica
    recipe.put("training.global_batch", total)
    if (seq_len := flags.number("--seq-length")) is not None:
        recipe.put("training.seq_len", seq_len)
    steps, samples = flags.number("--train-iters"), flags.number("--train-samples")
    if steps is None and samples is not None:
        steps = samples // recipe.get("training.global_batch")
        flags.note(
            "--train-samples", f"{samples} samples are {steps} steps of {total}; --train-iters is written"
        )
    if steps is not None:
        recipe.put("training.steps", steps)


def _precision(recipe: Recipe, flags: Flags) -> None:
    bf16, fp16 = flags.on("--bf16"), flags.on("--fp16")
    recipe.put("training.precision", "bf16" if bf16 else "fp16" if fp16 else "fp32")
    in_bf16, in_fp32 = flags.on("--grad-reduce-in-bf16"), flags.on("--accumulate-allreduce-grads-in-fp32")
    if in_bf16 or in_fp32 or (bf16 and recipe.groups["engine"] == "megatron"):
        recipe.put("training.grad_accum_dtype", "bf16" if in_bf16 and not in_fp32 else "fp32")


def _optimizer(recipe: Recipe, flags: Flags) -> None:
    kind = flags.text("--optimizer")
    if kind not in (None, "adam"):
        flags.note("--optimizer", f"{kind}: dslaunch plans and writes adam")
    if (lr := flags.real("--lr")) is not None:
        recipe.put("training.optimizer.lr", lr)
    recipe.put("training.optimizer.min_lr", flags.real("--min-lr") or 0.0)
    recipe.put(
        "training.optimizer.betas",
        [flags.real("--adam-beta1") or 0.9, flags.real("--adam-beta2") or 0.999],
    )
    recipe.put("training.optimizer.eps", flags.real("--adam-eps") or 1e-8)
    decay = flags.real("--weight-decay")
    recipe.put("training.optimizer.weight_decay", 0.01 if decay is None else decay)
    style = flags.text("--lr-decay-style") or "linear"
    if style not in _STYLES:
        flags.note("--lr-decay-style", f"{style}: known are {', '.join(_STYLES)}; cosine is written")
        style = "cosine"
    recipe.put("training.optimizer.schedule", style.lower())
    if style == "WSD":
        _decay(recipe, flags)
    _warmup(recipe, flags)


def _decay(recipe: Recipe, flags: Flags) -> None:
    """The steps in which the rate falls, and how."""
    steps, samples = flags.number("--lr-wsd-decay-iters"), flags.number("--lr-wsd-decay-samples")
    if samples:
        steps = samples // recipe.get("training.global_batch")
        flags.note("--lr-wsd-decay-samples", f"{samples} samples are {steps} steps")
    if steps:
        recipe.put("training.optimizer.decay_steps", steps)
    shape = flags.text("--lr-wsd-decay-style") or "exponential"
    if shape not in _SHAPES:
        flags.note("--lr-wsd-decay-style", f"{shape}: known are {', '.join(_SHAPES)}; linear is written")
    recipe.put("training.optimizer.decay_shape", _SHAPES.get(shape, "linear"))


def _warmup(recipe: Recipe, flags: Flags) -> None:
    """Steps of the warm-up; a fraction is one of the decay's (training.py get_optimizer_param_scheduler)."""
    steps = _decay_iters(recipe, flags) or recipe.get("training.steps")
    warmup, fraction = flags.number("--lr-warmup-iters"), flags.real("--lr-warmup-fraction")
    samples = flags.number("--lr-warmup-samples")
    if fraction is not None and steps:
        warmup = round(fraction * steps)
        flags.note(
            "--lr-warmup-fraction", f"{fraction} of {steps} steps are {warmup}; --lr-warmup-iters is written"
        )
    elif samples:
        warmup = samples // recipe.get("training.global_batch")
        flags.note(
            "--lr-warmup-samples", f"{samples} samples are {warmup} steps; --lr-warmup-iters is written"
        )
    recipe.put("training.optimizer.warmup_steps", warmup or 0)


def _decay_iters(recipe: Recipe, flags: Flags) -> int | None:
    """Steps after which the rate has come to its end, kept as they stand where they are not those of the run."""
    decay, samples = flags.number("--lr-decay-iters"), flags.number("--lr-decay-samples")
    if samples is not None:
        decay = samples // recipe.get("training.global_batch")
        flags.note("--lr-decay-samples", f"{samples} samples are {decay} steps; --lr-decay-iters is written")
    if decay is not None and decay != recipe.get("training.steps"):
        recipe.put("engine.extra.lr-decay-iters", decay)
    return decay


def take_data(recipe: Recipe, flags: Flags) -> None:
    """Data, tokenizer and checkpoints; what names a place of another machine is kept as it is."""
    if (paths := flags.left.get("--data-path")) and not any("$" in path for path in paths):
        flags.left.pop("--data-path")
        recipe.put("data.path", " ".join(paths))
    if tokenizer := flags.text("--tokenizer-model"):
        recipe.put("data.tokenizer", tokenizer)
        if kind := flags.text("--tokenizer-type"):
            flags.note("--tokenizer-type", f"{kind}: the kind of file that data.tokenizer names decides it")
    for flag, key in (("--save", "checkpoint.dir"), ("--load", "checkpoint.load")):
        if place := flags.text(flag):
            recipe.put(key, place)
    if every := flags.number("--save-interval"):
        recipe.put("checkpoint.every", every)
    if minutes := flags.number("--distributed-timeout-minutes"):
        recipe.put("launcher.timeout_minutes", float(minutes))
