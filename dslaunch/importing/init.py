"""`dslaunch init`: a recipe around a training script that is there already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.files.fileset import read_paths
from dslaunch.importing.imported import Imported, Note, checked_name
from dslaunch.importing.megatron import import_megatron
from dslaunch.importing.recipe import Recipe, begun, require
from dslaunch.importing.scripts import Script, read_script

KINDS = ("hf_trainer", "accelerate", "megatron", "deepspeed", "fsdp", "ddp")
QUESTIONS = (
    ("model", "Model, one of `dslaunch models`"),
    ("cluster", "Cluster, such as 8xA100; `dslaunch clusters` lists the types"),
    ("training.global_batch", "Samples per optimizer step, over all GPUs; empty: as the script sets them"),
    ("training.seq_len", "Tokens per sample, image tokens included; empty: as the script sets them"),
)
"""What every recipe needs, and few scripts tell; asked on a terminal."""

_GROUPS = {
    # kind: (strategy, engine)
    "hf_trainer": ("zero2", "deepspeed"),
    "accelerate": ("ddp", "torch"),
    "megatron": ("layouts", "megatron"),
    "deepspeed": ("zero2", "deepspeed"),
    "fsdp": ("fsdp2", "torch"),
    "ddp": ("ddp", "torch"),
}
_SETTINGS = {
    "micro_batch": ("per_device_train_batch_size", "per_device_batch_size", "micro_batch_size", "batch_size",
                    "train_batch_size", "micro_batch"),
    "num_microbatches": ("gradient_accumulation_steps", "grad_accumulation_steps", "grad_accum_steps",
                         "accum_steps"),
    "global_batch": ("global_batch_size", "total_batch_size"),
    "seq_len": ("seq_len", "seq_length", "sequence_length", "max_seq_length", "max_seq_len", "block_size"),
    "steps": ("max_steps", "train_steps", "num_steps", "total_steps", "max_iters", "steps"),
    "seed": ("seed",),
    "lr": ("learning_rate", "lr"),
    "weight_decay": ("weight_decay",),
    "warmup_steps": ("warmup_steps", "num_warmup_steps", "lr_warmup_steps"),
    "clip": ("max_grad_norm", "grad_clip_norm", "grad_clip", "clip_grad"),
    "checkpoint_dir": ("output_dir", "out_dir", "save_dir", "checkpoint_dir", "run_root_dir"),
}  # fmt: skip
"""What an argument may hold as {NAME} -> names of options that scripts give it. Of several in one script the first
counts."""
_KEYS = {
    "seq_len": "training.seq_len",
    "steps": "training.steps",
    "seed": "training.seed",
    "lr": "training.optimizer.lr",
    "weight_decay": "training.optimizer.weight_decay",
    "warmup_steps": "training.optimizer.warmup_steps",
    "clip": "training.clip",
}
"""Where the recipe keeps what the script sets itself; the batch is a matter of its own."""
_FROM_ZERO = ("seed", "weight_decay", "warmup_steps", "clip")
_WHOLE = ("seq_len", "steps", "seed", "warmup_steps", "micro_batch", "num_microbatches", "global_batch")
_TRAINER_OPTIONS = ("--output_dir", "--per_device_train_batch_size", "--gradient_accumulation_steps",
                    "--learning_rate", "--weight_decay", "--warmup_steps", "--max_steps", "--max_grad_norm",
                    "--seed")  # fmt: skip


def init(
    script: str,
    words: Sequence[str] = (),
    script_arguments: Sequence[str] = (),
    *,
    name: str = "",
    kind: str = "",
) -> Imported:
    """A recipe that runs `script`.

    Args:
        script: a Python file, or a shell script that starts Megatron's.
        words: KEY=VALUE for the recipe; QUESTIONS says what is needed.
        script_arguments: the script's own arguments; they win over those made here.
        name: of the recipe; made from the file's where it is empty.
        kind: one of KINDS, where reading the script leaves a doubt.

    Raises:
        ConfigError: no such file, no Python, nothing in it that distributes work, or a word missing.
    """
    if kind and kind not in KINDS:
        raise ConfigError(f"--kind {kind}: allowed are {listed(KINDS)}.{nearest(kind, KINDS)}")
    if Path(script).suffix in (".sh", ".sbatch", ".slurm"):
        return import_megatron(script, words, name)
    (file,) = read_paths([Path(script)]).files
    facts = read_script(file.text, script)
    kind = kind or facts.kind
    if not kind:
        raise ConfigError(
            f"{script}: nothing in it shares work among GPUs (no Trainer, Accelerator, deepspeed.initialize, "
            f"DistributedDataParallel or fully_shard). Where an import hides it, say --kind: {listed(KINDS)}."
        )
    name = checked_name(name, Path(script).stem)
    recipe = begun(name, f"{Path(script).name}, {_SAID[kind]}", words)
    taken = _take_numbers(recipe, facts)
    require(recipe, *(key for key, _ in QUESTIONS), source=script)
    strategy, engine = _GROUPS[kind]
    recipe.groups.setdefault("strategy", strategy)
    recipe.groups.setdefault("engine", engine)
    recipe.put("script", script)
    notes = _fill(recipe, facts, kind, script_arguments)
    head = [
        f"Written around {Path(script).name}, {_SAID[kind]}.",
        "An argument such as {micro_batch} is filled in from the plan when the files are rendered.",
        *([f"As the script sets them: {', '.join(taken)}."] if taken else []),
    ]
    return Imported(name, {f"recipes/{name}.yaml": recipe.text(notes, head)}, notes, recipe.choices)


_SAID = {
    "hf_trainer": "a script of Hugging Face's Trainer",
    "accelerate": "a script of accelerate",
    "megatron": "a script of Megatron",
    "deepspeed": "a script with a DeepSpeed engine",
    "fsdp": "a script with PyTorch's FSDP",
    "ddp": "a script with PyTorch's DistributedDataParallel",
}


def _take_numbers(recipe: Recipe, facts: Script) -> list[str]:
    """What the script sets itself goes into the recipe, where the user said nothing; the words for its head."""
    set_there = dict(facts.numbers)
    found: dict[str, float] = {}
    for setting, names in _SETTINGS.items():
        value = next((set_there[name] for name in names if name in set_there), None)
        least = 0 if setting in _FROM_ZERO else 1e-12
        if value is not None and value >= least and (setting not in _WHOLE or value == int(value)):
            found[setting] = int(value) if setting in _WHOLE else float(value)
    keys = {_KEYS[setting]: value for setting, value in found.items() if setting in _KEYS}
    new = {key: value for key, value in [*_batch(recipe, found), *keys.items()] if recipe.get(key) is None}
    for key, value in new.items():
        recipe.put(key, value)
    if set_there.get("gradient_checkpointing") or facts.has("gradient_checkpointing_enable"):
        recipe.put("strategy.every.recompute", "full")
    return [f"{key.rpartition('.')[2]} {value:g}" if value < 1 else f"{key.rpartition('.')[2]} {value}"
            for key, value in new.items()]  # fmt: skip


def _batch(recipe: Recipe, found: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The micro-batch where it divides the batch that the user gave, and what it comes to where he gave none."""
    total, micro = recipe.get("training.global_batch"), found.get("micro_batch")
    if total is None and "global_batch" in found:
        yield "training.global_batch", found["global_batch"]
    elif micro and recipe.gpus and recipe.get("training.micro_batch") is None:
        if total is None:
            yield "training.global_batch", micro * found.get("num_microbatches", 1) * recipe.gpus
        if total is None or (isinstance(total, int) and total % (micro * recipe.gpus) == 0):
            yield "training.micro_batch", micro


def _fill(recipe: Recipe, facts: Script, kind: str, given: Sequence[str]) -> tuple[Note, ...]:
    """Arguments and environment; what the user has to see to himself as notes."""
    arguments, notes = _settings(facts, kind), []
    if kind == "hf_trainer":
        notes += _trainer(recipe, facts, arguments)
    elif kind == "deepspeed":
        notes += _deepspeed(facts, arguments)
    elif kind == "accelerate":
        recipe.put("engine.accelerate", True)
    if kind in ("ddp", "fsdp") and not arguments:
        notes.append(
            Note("script_args", "no option of the script is known; hand it batch and learning rate after --")
        )
    kept = [word for option, value in arguments.items() if option not in given for word in (option, value)]
    if kept or given:
        recipe.put("script_args", [*kept, *given])
    return (*notes, *_trained(recipe, facts))


def _trained(recipe: Recipe, facts: Script) -> Iterator[Note]:
    """What the script trains is its own affair; memory is right only where the recipe says the same."""
    told = recipe.get("model.components") or {}
    if any("train" in component for component in told.values()):
        return
    if facts.has("LoraConfig", "get_peft_model"):
        numbers = dict(facts.numbers)
        written = {key: _number_of(text, numbers) for key, text in facts.adapters}
        train = "qlora" if facts.has("BitsAndBytesConfig", "load_in_4bit") else "lora"
        sizes = ", ".join(f"{ours}: {_whole(written.get(theirs))}" for ours, theirs in _ADAPTERS.items())
        yield Note(
            "LoraConfig",
            "the plan counts every parameter as trained. For each component that has adapters add "
            f"model.components.NAME.train={train} 'model.components.NAME.lora={{{sizes}}}'",
        )
    elif facts.has("requires_grad_", "requires_grad"):
        yield Note(
            "requires_grad",
            "the plan counts every parameter as trained. For each component that the script freezes add "
            "model.components.NAME.train=nothing",
        )


_ADAPTERS = {"rank": "r", "alpha": "lora_alpha"}


def _number_of(text: str, numbers: Mapping[str, float]) -> str:
    """`cfg.lora_rank` as the script sets lora_rank, anything else as it stands."""
    return str(numbers.get(text.rpartition(".")[2], text))


def _whole(text: str | None) -> str:
    """A number as the script has it; 16 stands for one that a variable holds."""
    return text if text and text.isdigit() else "16"


def _settings(facts: Script, kind: str) -> dict[str, str]:
    """Option -> what it is given, for the options that the script is known to take."""
    trainers = _TRAINER_OPTIONS if kind == "hf_trainer" and facts.takes_trainer_options else ()
    by_name = {option.lstrip("-").replace("-", "_"): option for option in (*facts.options, *trainers)}
    found: dict[str, str] = {}
    for setting, names in _SETTINGS.items():
        option = next((by_name[name] for name in names if name in by_name), None)
        if option:
            found[option] = f"{{{setting}}}"
    return found


def _trainer(recipe: Recipe, facts: Script, arguments: dict[str, str]) -> list[Note]:
    """The Trainer compares the JSON with its own arguments, schedule and precision among them."""
    if not facts.takes_trainer_options:
        recipe.put("engine.huggingface", True)
        return [
            Note(
                "TrainingArguments",
                "are written in the script: set deepspeed=os.environ['DSLAUNCH_DS_CONFIG'] there; what stands as "
                "`auto` in that file the Trainer fills in from them, and the plan counts on its own values",
            )
        ]
    schedule = recipe.get("training.optimizer.schedule") or "constant"
    recipe.put("training.optimizer.schedule", schedule)
    _require_plain(schedule, recipe.get("training.optimizer.min_lr"))
    warmup = recipe.get("training.optimizer.warmup_steps") or 0
    kind = "constant_with_warmup" if schedule == "constant" and warmup else schedule
    precision = recipe.get("training.precision") or "bf16"
    arguments["--deepspeed"] = "{ds_config}"
    arguments["--lr_scheduler_type"] = kind
    arguments["--adam_beta1"], arguments["--adam_beta2"] = map(
        str, recipe.get("training.optimizer.betas") or (0.9, 0.95)
    )
    if precision != "fp32":
        arguments[f"--{precision}"] = "True"
    if recipe.groups["cluster"] != "local":
        return []
    return [
        Note(
            "script_args", "where this machine has no GPU the Trainer needs --use_cpu True: give it after --"
        )
    ]


def _require_plain(schedule: str, min_lr: float | None) -> None:
    """Raises ConfigError for a schedule that the Trainer's options cannot say without a JSON object among them."""
    if schedule == "wsd" or (schedule == "cosine" and min_lr):
        what = "training.optimizer.schedule=wsd" if schedule == "wsd" else f"training.optimizer.min_lr={min_lr}"
        raise ConfigError(
            f"{what}: a Trainer script gets its schedule by --lr_scheduler_type alone here. Leave it out, and "
            "set it in the written recipe with engine.huggingface=true, whose hf_args.json has all arguments"
        )


def _deepspeed(facts: Script, arguments: dict[str, str]) -> list[Note]:
    declared = [o for o in ("--deepspeed_config", "--ds_config", "--deepspeed-config") if o in facts.options]
    if declared or "deepspeed.add_config_arguments" in facts.calls:
        arguments[declared[0] if declared else "--deepspeed_config"] = "{ds_config}"
        return []
    return [
        Note("deepspeed.initialize", "hand it config=os.environ['DSLAUNCH_DS_CONFIG'], the rendered file")
    ]
