"""Command lines of `accelerate launch`: options that its parser refuses, and options that exclude each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dslaunch.engines.megatron_catalogue import Argument
from dslaunch.engines.trainer_catalogue import accelerate_options, accelerate_versions
from dslaunch.errors import listed, nearest
from dslaunch.files.commands import CommandLine, Launcher
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Flag, is_told
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_SOURCE = "huggingface/accelerate:src/accelerate/commands/launch.py"
_PARSER = f"{_SOURCE} launch_command_parser 0.30.1 to 1.15.0, run"
_VALIDATION = f"{_SOURCE} _validate_launch_command, utils/launch.py 0.30.1 to 1.15.0, run"
TRUE = ("y", "yes", "t", "true", "on", "1")
FALSE = ("n", "no", "f", "false", "off", "0")
"""What accelerate's str_to_bool takes, in any case of letters."""


@dataclass(frozen=True)
class Started:
    """One command of `accelerate launch`, and the configuration file that it names, where that is known."""

    file: File
    command: CommandLine
    launcher: Launcher
    config: File | None

    def flag(self, name: str) -> Flag | None:
        """The last `--name`, typed with underscores or dashes."""
        return self.launcher.options.flag(f"--{name}", f"--{name.replace('_', '-')}")

    def value(self, name: str) -> str | None:
        """The value of `--name`; None where it isn't given, or isn't told."""
        flag = self.flag(name)
        return flag.values[-1] if flag and flag.values and is_told(flag.values[-1]) else None

    def number(self, name: str) -> int | None:
        """The value of `--name` as a whole number, else what the configuration says."""
        if self.flag(name) is None:
            given: Any = self.config.get(name) if self.config else None
            return given if isinstance(given, int) and not isinstance(given, bool) else None
        return _whole(self.value(name))

    def hit(self, flag: Flag | None, message: str, fix: str) -> Hit:
        """A finding at the option, or at the command."""
        return Hit(self.file.name, flag.at if flag else self.launcher.at, message, fix)


_LOOKED_AT = 200
"""Options of one command; accelerate has some 120."""


def started(files: FileSet) -> Iterator[Started]:
    """Every `accelerate launch` among the files."""
    every = files.of("accelerate")
    configs = {file.name.rpartition("/")[2]: file for file in every if not file.inside}
    for file, command in files.launches():
        launcher = command.launcher("accelerate")
        if launcher is not None and not launcher.options.has("-h", "--help"):
            named = launcher.options.value("--config_file", "--config-file") or ""
            base = named.rpartition("/")[2]
            held = next((each for each in every if each.inside and _writes(file, each, base)), None)
            yield Started(file, command, launcher, configs.get(base) or held)


def _writes(file: File, config: File, name: str) -> bool:
    """Whether a script writes this configuration under the name, by the line above it."""
    above = file.lines[max(0, config.at().line - 2)] if config.name == file.name else ""
    return bool(name) and "<<" in above and (name in above or "$" in above)


def _whole(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


@rule("accelerate.option", severity="error", raised_by="accelerate", evidence=_PARSER)
def option(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An option, or a value, that `accelerate launch` doesn't have: it prints its usage and exits."""
    for start in started(files):
        for flag in start.launcher.options.flags[:_LOOKED_AT]:
            if is_told(flag.name):
                yield from _of_flag(start, flag)
        given = start.launcher.options
        if start.command.script is None and given.complete:
            last = given.flags[-1] if given.flags else None
            message = "accelerate launch is given no script; an option takes the word behind it as its value."
            yield start.hit(last, message, "Name the script behind the options.")


def _of_flag(start: Started, flag: Flag) -> Iterator[Hit]:
    known, newest = accelerate_options().elsewhere, accelerate_versions()[-1]
    if not flag.name.startswith("--") and len(flag.name) > 2 and flag.name[:2] in known:
        return
    if flag.name not in known:
        near = nearest(flag.name, known)
        message = f"accelerate launch has no option {flag.name}, and takes none cut short; it exits."
        yield start.hit(flag, message, f"Take it out, or put it behind the script where it is the script's.{near}")
        return
    spans = known[flag.name]
    if not any(each.until == newest for each in spans):
        message = f"accelerate has no {flag.name} any more: the last known version with it is {spans[-1].until}."
        yield Hit(start.file.name, flag.at, message, "Take it out, or keep that version.", "info")
    joined = bool(flag.values) and f"{flag.name}={flag.values[0]}" in start.file.text
    faults = [fault(flag, each, joined=joined) for each in spans]
    if all(faults):
        yield start.hit(flag, f"{flag.name}: {faults[-1]}; accelerate launch exits.", "Correct the value.")


def fault(flag: Flag, argument: Argument, *, joined: bool) -> str:
    """What accelerate's parser says of the value; empty where it takes it, or where it isn't told.

    Args:
        joined: written as `--name=value`, where a value may begin with a dash.
    """
    if argument.nargs == "0":
        return f"it takes no value, and {flag.values[0]!r} is given" if flag.values else ""
    if not flag.values or (not joined and _is_option(flag.values[0])):
        return "its value is missing"
    value = flag.values[0]
    if not is_told(value):
        return ""
    if argument.choices and value not in argument.choices:
        return f"{value!r} is none of {listed(argument.choices)}"
    return _of_type(value, argument.type)


def _of_type(value: str, kind: str) -> str:
    if kind.startswith("str_to_bool"):
        parts = value.split(",") if kind == "str_to_bools" else [value]
        wrong = next((part for part in parts if part.lower() not in TRUE + FALSE), None)
        return "" if wrong is None else f"{wrong!r} is neither true nor false"
    try:
        _NUMBERS.get(kind, str)(value)
    except ValueError:
        return f"{value!r} is no {'whole number' if kind == 'int' else 'number'}"
    return ""


_NUMBERS: Mapping[str, Callable[[str], object]] = {"int": int, "float": float}


def _is_option(text: str) -> bool:
    """argparse takes `-1` for a value, and `-x` for an option; a text with a blank is a value, but for `--x=`."""
    if text.partition("=")[0] in accelerate_options().elsewhere:
        return True
    if not text.startswith("-") or text == "-" or " " in text:
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False


_ONE_OF = ("multi_gpu", "cpu", "tpu", "use_deepspeed", "use_fsdp")


@rule("accelerate.together", severity="error", raised_by="accelerate", evidence=_VALIDATION)
def together(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Options of `accelerate launch` that exclude each other, or that need another one."""
    for start in started(files):
        yield from _excluded(start)
        yield from _processes(start)
        if start.config is None and start.flag("config_file") is None:
            yield from _machines(start)


def _excluded(start: Started) -> Iterator[Hit]:
    chosen = [name for name in _ONE_OF if start.flag(name)]
    if len(chosen) > 1:
        names = " and ".join(f"--{name}" for name in chosen)
        yield start.hit(start.flag(chosen[-1]), f"{names} exclude each other: ValueError.", "Keep one.")
    mesh = start.flag("use_parallelism_config")
    if mesh and not start.flag("use_fsdp") and start.launcher.options.complete:
        message = "--use_parallelism_config without --use_fsdp on the same line: ValueError."
        yield start.hit(mesh, message, "Add --use_fsdp --fsdp_version 2, or write it into the configuration.")
    bare = start.flag("no_python")
    if bare and start.launcher.options.has("-m", "--module"):
        yield start.hit(bare, "--module and --no_python exclude each other: ValueError.", "Keep one.")


def _processes(start: Started) -> Iterator[Hit]:
    several, count = start.flag("multi_gpu"), _whole(start.value("num_processes"))
    if several and count is not None and count < 2:
        message = f"--multi_gpu with --num_processes {count}: accelerate raises ValueError."
        yield start.hit(start.flag("num_processes"), message, "Start 2 or more, or drop --multi_gpu.")
    config = start.config
    if config is None or start.flag("num_processes") or not start.launcher.options.complete:
        return
    kind = config.get("distributed_type")
    if isinstance(config.value, dict) and config.get("num_processes") in (None, -1) and kind not in (None, "NO"):
        message = f"neither {config.name} nor the command says num_processes: accelerate raises ValueError."
        yield start.hit(start.flag("config_file"), message, "Add --num_processes, of all machines together.")


def _machines(start: Started) -> Iterator[Hit]:
    machines = start.number("num_machines")
    paradigm = any(start.flag(name) for name in ("multi_gpu", "use_fsdp", "use_deepspeed", "use_megatron_lm"))
    if machines is None or machines < 2 or not paradigm or not start.launcher.options.complete:
        return
    hosts = start.value("deepspeed_multinode_launcher") not in (None, "standard", "nossh")
    for name in ("machine_rank", "main_process_ip"):
        if start.flag(name) is None and not (start.flag("use_deepspeed") and hosts):
            says = "int(None), a TypeError" if name == "machine_rank" else "they are to meet at a host called None"
            message = f"{machines} machines without --{name}: {says}, unless the default configuration has it."
            yield start.hit(start.flag("num_machines"), message, f"Give each machine its --{name}.")


@rule("accelerate.truth", severity="wrong", raised_by="nobody", evidence=_PARSER)
def truth(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An option that is made true by any text, `false` too."""
    known = accelerate_options().arguments
    for start in started(files):
        for flag in start.launcher.options.flags:
            argument = known.get(flag.name)
            if argument and argument.type == "bool" and flag.values and flag.values[0].lower() in FALSE:
                message = f"{flag.name} {flag.values[0]}: accelerate takes any text for true."
                yield start.hit(flag, message, f"Leave {flag.name} out: it is false then.")


def overridden(files: FileSet) -> dict[str, frozenset[str]]:
    """By configuration, the options that a command gives in its place."""
    return {
        start.config.name: frozenset(
            flag.name.removeprefix("--").replace("-", "_") for flag in start.launcher.options.flags
        )
        for start in started(files)
        if start.config
    }
