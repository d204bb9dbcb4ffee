"""Options of `accelerate launch` behind the script: they are the script's."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.files.commands import CommandLine, Launcher
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Flag
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.launched import started
from dslaunch.rules.settings import Settings

_OPTIONS = frozenset({
    "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "multi_gpu",
    "use_deepspeed", "deepspeed_config_file", "deepspeed_hostfile", "use_fsdp", "dynamo_backend",
})  # fmt: skip
"""Those that scripts seldom have of their own."""


@rule(
    "accelerate.after-script", severity="wrong", raised_by="nobody",
    evidence="huggingface/accelerate:src/accelerate/commands/launch.py launch_command_parser 1.15.0, run",
)  # fmt: skip
def after_script(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Options of accelerate launch behind the script: accelerate never sees them."""
    for file, command in files.launches():
        launcher = command.launcher("accelerate")
        if launcher is None or command.script is None:
            continue
        script = started(files, command)
        own = script.python.text.replace("-", "_") if script else ""
        for flag in _misplaced(files, command, launcher):
            if _plain(flag) not in own:
                message = f"{flag.name} stands behind {command.script.text}: accelerate launch doesn't read it."
                yield Hit(file.name, flag.at, message, "Move it in front of the script.")


def _misplaced(files: FileSet, command: CommandLine, launcher: Launcher) -> Iterator[Flag]:
    """The launcher's options among the script's, unless the launcher has them too."""
    before = {_plain(flag) for flag in launcher.options.flags}
    for flag in command.arguments.flags if launcher.options.complete else ():
        name = _plain(flag)
        mine = name in _OPTIONS
        if name == "config_file":
            mine = any(_names(flag, file) for file in files.of("accelerate"))
        if flag.name.startswith("--") and mine and name not in before:
            yield flag


def _plain(flag: Flag) -> str:
    return flag.name.removeprefix("--").replace("-", "_")


def _names(flag: Flag, file: File) -> bool:
    """Whether the option's value is this file."""
    return bool(flag.values) and flag.values[0].rpartition("/")[2] == file.name.rpartition("/")[2]
