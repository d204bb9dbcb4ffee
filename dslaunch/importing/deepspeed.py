"""`dslaunch import deepspeed`: a recipe from a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.importing.deepspeed_file import AUTO, flattened, read_config
from dslaunch.importing.deepspeed_modes import take_modes
from dslaunch.importing.deepspeed_schedule import take_schedule
from dslaunch.importing.deepspeed_source import Source
from dslaunch.importing.imported import Imported, Note, checked_name
from dslaunch.importing.recipe import Recipe, begun, require
from dslaunch.importing.taken import deepspeed_refusal

_FILLED_IN = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Where one of these is `auto`, the Trainer reads the file: it is rendered with `auto` again."""
_ADAMS = ("adam", "adamw")
_OF_ADAM = ("lr", "betas", "eps", "weight_decay")
"""Parameters that mean the same in its variants, such as OnebitAdam; what Lamb calls so is something else."""


def import_deepspeed(
    path: str, words: Sequence[str] = (), script_arguments: Sequence[str] = (), name: str = ""
) -> Imported:
    """The recipe of a DeepSpeed configuration.

    Args:
        path: the JSON file.
        words: what the file cannot say, as KEY=VALUE: model, cluster, training.seq_len, script, ...
        script_arguments: the script's own.
        name: the recipe's name; made from the file's where it is empty.

    Raises:
        ConfigError: no DeepSpeed configuration, or something missing that the file does not say.
    """
    config = read_config(path)
    name = checked_name(name, Path(path).stem)
    recipe = begun(name, f"imported from {Path(path).name}", words, script_arguments)
    notes = take_deepspeed(recipe, config, path)
    head = [f"Imported from the DeepSpeed configuration {Path(path).name}."]
    text = recipe.text(notes, head)
    return Imported(name, {f"recipes/{name}.yaml": text}, notes, recipe.choices, dict(flattened(config)))


def take_deepspeed(recipe: Recipe, config: Mapping[str, Any], path: str) -> tuple[Note, ...]:
    """Fills the recipe from a configuration; the notes of what is not carried over."""
    source = Source(config, path)
    recipe.groups.setdefault("engine", "deepspeed")
    if any(source.left.get(key) == AUTO for key in _FILLED_IN):
        recipe.put("engine.huggingface", True)
    told = any(source.left.get(key) not in (None, AUTO) for key in _FILLED_IN[:2])
    batch = () if told or recipe.get("training.micro_batch") else ("training.global_batch",)
    require(recipe, "model", "cluster", "training.seq_len", *batch, source=path)
    _strategy(recipe, source)
    _batch(recipe, source, path)
    _precision(recipe, source)
    _clip(recipe, source)
    _note_filled_in(recipe, source)
    _optimizer(recipe, source)
    take_schedule(recipe, source)
    _extra(recipe, source)
    return tuple(source.notes)


def _note_filled_in(recipe: Recipe, source: Source) -> None:
    """Values of the optimizer that stand in a file which leaves others to the Trainer."""
    if not recipe.get("engine.huggingface"):
        return
    for key in ("lr", "betas", "eps", "weight_decay"):
        if source.left.get(dotted := f"optimizer.params.{key}") not in (None, AUTO):
            source.note(dotted, "auto is written as for the others, and the value stands in hf_args.json")


def _strategy(recipe: Recipe, source: Source) -> None:
    stage = int(source.take("zero_optimization.stage") or 0)
    if (switch := source.take("zero_optimization")) is not None:
        stage = int(bool(switch))
        source.note(
            "zero_optimization", f"{switch}: the old form of zero_optimization.stage {stage}, written so"
        )
    recipe.groups.setdefault("strategy", f"zero{stage}")
    take_modes(recipe, source)
    overlap = source.take("zero_optimization.overlap_comm")
    recipe.put("training.overlap_comm", bool(stage == 3 if overlap is None else overlap))
    if (tp := int(source.take("tensor_parallel.autotp_size") or 1)) > 1:
        recipe.put("strategy.every.tp", tp)
    if (cp := source.take("sequence_parallel_size")) and cp > 1:
        recipe.put("strategy.every.cp", cp)


def _batch(recipe: Recipe, source: Source, path: str) -> None:
    """DeepSpeed derives the third of three; without train_batch_size it takes the number of ranks."""
    total = source.take("train_batch_size")
    micro = source.take("train_micro_batch_size_per_gpu")
    steps = source.take("gradient_accumulation_steps")
    own_micro = recipe.get("training.micro_batch") is not None
    replicas = _replicas(recipe)
    if total and micro and replicas:
        _refuse_other_ranks(recipe, total, micro * (steps or 1), replicas, path)
    if micro:
        recipe.put("training.micro_batch", micro)
    elif (total or (steps and recipe.get("training.global_batch"))) and not own_micro:
        recipe.put("training.micro_batch", None)
    if steps or (total and not micro and not own_micro):
        recipe.put("training.num_microbatches", steps or 1)
    if total is None and micro and replicas:
        total = micro * (steps or 1) * replicas
    if total:
        recipe.put("training.global_batch", total)
    require(recipe, "training.global_batch", source=path)


def _refuse_other_ranks(recipe: Recipe, total: int, of_one: int, replicas: int, path: str) -> None:
    """The three batch keys together tell for how many GPUs the file was written."""
    fixed = any(recipe.get(f"training.{key}") for key in ("global_batch", "micro_batch", "num_microbatches"))
    if not fixed and total % (of_one * replicas):
        raise ConfigError(
            f"{path}: train_batch_size {total} / {of_one} samples of each GPU = {total / of_one:g} replicas, and "
            f"cluster={recipe.groups['cluster']} has {replicas}. Give the cluster that it was written for, or "
            f"training.global_batch={of_one * replicas}."
        )


def _replicas(recipe: Recipe) -> int | None:
    cut = (recipe.get("strategy.every.tp") or 1) * (recipe.get("strategy.every.cp") or 1)
    return recipe.gpus // cut if recipe.gpus else None


def _precision(recipe: Recipe, source: Source) -> None:
    auto = AUTO in (source.left.get(f"{section}.enabled") for section in ("bf16", "bfloat16", "fp16"))
    bf16, fp16 = source.take("bf16.enabled", "bfloat16.enabled"), source.take("fp16.enabled")
    recipe.put("training.precision", "fp16" if fp16 else "bf16" if bf16 or auto else "fp32")
    precision = recipe.get("training.precision")
    for section in ("bf16", "bfloat16", "fp16"):
        for key in source.under(section):
            if section.replace("bfloat16", "bf16") != precision:
                source.left.pop(key)
                source.note(key, f"{section} is off: DeepSpeed reads the section only where it is on")
    accum = source.take("data_types.grad_accum_dtype")
    if accum is not None:
        recipe.put("training.grad_accum_dtype", accum)


def _clip(recipe: Recipe, source: Source) -> None:
    """Off where it is absent; the Trainer's own value, and dslaunch's, is 1 where it is `auto`."""
    auto = source.left.get("gradient_clipping") == AUTO
    clip = source.take("gradient_clipping")
    recipe.put("training.clip", float(1.0 if auto else clip or 0.0))


def _optimizer(recipe: Recipe, source: Source) -> None:
    """AdamW; Adam is AdamW in DeepSpeed unless adam_w_mode says otherwise."""
    kind = source.take("optimizer.type")
    known = kind is not None and str(kind).lower() in _ADAMS
    variant = kind is not None and "adam" in str(kind).lower()
    if kind is None:
        source.note(
            "optimizer", "absent: the script makes its own; AdamW is written, which it must not contradict"
        )
    elif not known:
        source.note("optimizer.type", f"{kind}: dslaunch plans and writes AdamW")
        for key in source.under("optimizer.params"):
            if not (variant and key.rpartition(".")[2] in _OF_ADAM):
                source.left.pop(key)
                source.note(key, f"a parameter of {kind}")
    elif kind != "AdamW":
        source.note("optimizer.type", f"{kind} is AdamW in DeepSpeed (adam_w_mode), and is written so")
    decoupled = source.take("optimizer.params.adam_w_mode")
    if decoupled is not None and known:
        own = decoupled or str(kind).lower() == "adamw"
        reason = (
            "is AdamW's, which is written"
            if own
            else "L2 regularisation instead of weight decay is not planned"
        )
        source.note("optimizer.params.adam_w_mode", reason)
    for key, own in (("lr", "lr"), ("eps", "eps"), ("weight_decay", "weight_decay")):
        value = source.real(f"optimizer.params.{key}")
        if value is not None:
            recipe.put(f"training.optimizer.{own}", value)
        elif variant and key != "lr":
            recipe.put(f"training.optimizer.{own}", {"eps": 1e-8, "weight_decay": 0.0}[key])
    betas = source.take("optimizer.params.betas")
    if betas is not None and not _is_pair(betas):
        raise ConfigError(f"{source.path}: optimizer.params.betas is {betas!r}: two numbers belong there.")
    if betas or variant:
        recipe.put("training.optimizer.betas", [float(beta) for beta in betas or (0.9, 0.999)])


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(v, int | float) for v in value)


def _extra(recipe: Recipe, source: Source) -> None:
    """What is left goes to engine.extra where the renderer takes it, else into a note with its reason."""
    kept: dict[str, Any] = dict(recipe.get("engine.extra") or {})
    version = str(recipe.get("engine.version") or "")
    for dotted, value in source.left.items():
        if value == AUTO:
            source.note_auto(dotted)
            continue
        if refusal := deepspeed_refusal(_nested(dotted, value), version):
            source.note(dotted, refusal)
            continue
        _merge(kept, _nested(dotted, value))
    if kept:
        recipe.tree.setdefault("engine", {})["extra"] = kept


def _nested(dotted: str, value: Any) -> dict[str, Any]:
    for key in reversed(dotted.split(".")):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into.setdefault(key, value)
