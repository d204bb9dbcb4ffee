"""Environment modules in a script: what is loaded, and taken away again."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.files.script import Command
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_COMMANDS = ("module", "ml")
_LOADS = ("add", "load", "restore")


@rule("shell.module-purge", severity="wrong", raised_by="nobody", evidence="the manual page of Lmod 8.7")
def purge(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """`module purge` behind the modules that the launch needs: they are gone when it starts."""
    for file, script in files.scripts():
        launches = [launch.at for launch in script.launches]
        own = [each for each in script.commands if each.words[0].text in _COMMANDS and not each.conditional]
        for number, command in enumerate(own):
            if _word(command) != "purge":
                continue
            loaded = [each for each in own[:number] if _loads(each)]
            again = any(_loads(each) for each in own[number + 1 :])
            needed = any(at > command.at for at in launches) and not any(
                loaded and loaded[-1].at < at < command.at for at in launches
            )
            if loaded and needed and not again:
                message = f"this takes away what line {loaded[-1].at.line} loads, and nothing loads it again."
                yield Hit(file.name, command.at, message, "Write module purge in front of the first module load.")


def _word(command: Command) -> str:
    return command.words[1].text if len(command.words) > 1 else ""


def _loads(command: Command) -> bool:
    """`module load NAME`, `ml NAME`."""
    word = _word(command)
    bare = command.words[0].text == "ml" and word not in ("purge", "unload", "list", "avail", "")
    return word in _LOADS or (bare and not word.startswith("-"))
