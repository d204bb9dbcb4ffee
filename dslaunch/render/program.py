"""What runs on every rank, as words of a shell script, and what would keep it from running."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.planfile import Plan
from dslaunch.schema.config import RunConfig

RUN_DIR = '"$DSLAUNCH_RUN_DIR"'
MEGATRON_SCRIPTS = {"megatron": "pretrain_gpt.py", "megatron_deepspeed": "pretrain_gpt.py"}
"""By engine: what runs in the checkout that engine.path names."""
MEGATRON_ENGINES = frozenset({*MEGATRON_SCRIPTS, "megatron_mimo"})
"""Engines whose program reads megatron_args.txt, with a checkout on its path."""
_DECIDED = ("global_batch", "seq_len", "steps", "seed", "clip", "lr", "weight_decay", "warmup_steps")
"""Fields of the plan's training that an argument may hold as {NAME}, beside the files and the micro-batches."""
_NAMES = ("plan", "ds_config", "run_dir", "checkpoint_dir", "micro_batch", "num_microbatches", *_DECIDED)
_PLACEHOLDER = re.compile(rf"(\{{(?:{'|'.join(_NAMES)})\}})")
_MEGATRON_DATA = {"mock-data", "data-args-path", "per-split-data-args-path", "train-data-path"}
"""Keys of engine.extra that say where Megatron's data come from, instead of data.path."""
_RANDOM_TOKENS = {"megatron": ", or engine.extra.mock-data=true for random tokens"}


def checkpoint_word(plan: Plan) -> str:
    """The checkpoints' folder as a shell word: as the user gave it, or in the run folder."""
    given = plan.files.checkpoint_dir
    return shlex.quote(given) if given else f"{RUN_DIR}/checkpoints"


def check_program(config: RunConfig) -> None:
    """Raises ConfigError where script and module are both given, or the module is no dotted name."""
    if config.script and config.module:
        raise ConfigError(
            f"module: {config.module!r} and script: {config.script!r} are both given; one program runs. "
            "Take one of them out: module= or script= on the command line leaves it empty"
        )
    if config.module and not all(part.isidentifier() for part in config.module.split(".")):
        raise ConfigError(
            f"module: {config.module!r} is no module's name. Give a dotted name such as module=package.train, and "
            "arguments after --"
        )


def program_words(plan: Plan) -> tuple[str, ...]:
    """Interpreter options, script or module, and arguments, each a shell word that needs no more quoting.

    Raises:
        ConfigError: an argument holds {ds_config} or {micro_batch} where there is none, or several.
    """
    paths = {
        **_decided(plan),
        "{plan}": f"{RUN_DIR}/plan.json",
        "{run_dir}": RUN_DIR,
        "{checkpoint_dir}": checkpoint_word(plan),
    }
    if plan.engine.name in ("deepspeed", "megatron_deepspeed"):
        paths["{ds_config}"] = f"{RUN_DIR}/ds_config.json"
    arguments = [_word(argument, paths, plan.engine.name) for argument in plan.program.args]
    if plan.program.module:
        return ("-m", shlex.quote(plan.program.module), *arguments)
    if plan.engine.name in MEGATRON_SCRIPTS and not plan.program.script:
        return (f'"$DSLAUNCH_MEGATRON_PATH"/{MEGATRON_SCRIPTS[plan.engine.name]}', *arguments)
    return (shlex.quote(plan.program.script), *arguments)


def _decided(plan: Plan) -> dict[str, str]:
    """{NAME} of what the plan decides; micro-batches only where all components have the same."""
    found = {f"{{{name}}}": str(getattr(plan.training, name)) for name in _DECIDED}
    for name in ("micro_batch", "num_microbatches"):
        values = {getattr(component, name) for component in plan.components.values()}
        if len(values) == 1:
            found[f"{{{name}}}"] = str(values.pop())
    return found


def _word(argument: str, paths: Mapping[str, str], engine: str) -> str:
    pieces = [piece for piece in _PLACEHOLDER.split(argument) if piece]
    for name in ("{micro_batch}", "{num_microbatches}"):
        if name in pieces and name not in paths:
            raise ConfigError(
                f"script argument {argument!r}: the components have several. Use {{plan}}, which names each"
            )
    if "{ds_config}" in pieces and "{ds_config}" not in paths:
        raise ConfigError(
            f"script argument {argument!r}: engine {engine} has no single DeepSpeed configuration. "
            "Use {run_dir}, or engine=deepspeed"
        )
    return "".join(paths.get(piece) or shlex.quote(piece) for piece in pieces) or "''"


def launch_blocker(plan: Plan, extra: Mapping[str, Any]) -> str:
    """Why a launch cannot start, in a sentence with the key to set; empty where it can.

    The files are rendered all the same, so that they can be reviewed; the scripts stop with this sentence.

    Args:
        extra: engine.extra.
    """
    if plan.engine.name == "megatron_mimo" and not plan.program.script:
        return (
            f"Megatron-LM's examples/mimo/pretrain_mimo.py builds a model of its own, not {plan.model['name']}. "
            "Add script=PATH: an entry of yours that registers a provider for it"
        )
    if plan.engine.name in MEGATRON_ENGINES:
        return _megatron_blocker(plan, extra)
    if not plan.program.script and not plan.program.module:
        return (
            f"engine {plan.engine.name} runs a training script of yours, and none is named. "
            "Add script=PATH, and its arguments after --; or module=dslaunch.runtime, which trains a model's file"
        )
    return ""


def _megatron_blocker(plan: Plan, extra: Mapping[str, Any]) -> str:
    if not plan.files.data_path and not _MEGATRON_DATA & set(extra):
        return (
            "data.path is empty: Megatron needs a data set. Add data.path=PREFIX (what stands before .bin and "
            f".idx){_RANDOM_TOKENS.get(plan.engine.name, '')}"
        )
    if not plan.files.tokenizer and "tokenizer-type" not in extra and "mock-data" not in extra:
        return (
            "data.tokenizer is empty: Megatron needs the tokenizer that the data were made with. "
            "Add data.tokenizer=FOLDER, or engine.extra.tokenizer-type=TYPE"
        )
    return ""
