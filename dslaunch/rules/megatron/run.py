"""Megatron's arguments as its own validation sees them: given values, or the parser's defaults."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from typing import TypeVar

from dslaunch.engines.deepspeed_keys import release
from dslaunch.engines.megatron_catalogue import (
    megatron_catalogue,
    megatron_deepspeed_catalogue,
    megatron_versions,
)
from dslaunch.engines.versions import named
from dslaunch.files import loops
from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import Arguments, Flag, is_told
from dslaunch.files.loops import Passes
from dslaunch.files.megatron import arguments_of, is_megatron
from dslaunch.files.position import Position
from dslaunch.rules.registry import Edit, Hit, Severity
from dslaunch.rules.settings import Settings

Found = TypeVar("Found")
_ELSEWHERE = (
    "--use-checkpoint-args", "--use-mp-args-from-checkpoint-args", "--yaml-cfg", "--export-kd-teacher-load",
    "--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json",
    "--hybrid-layer-pattern", "--hybrid-override-pattern", "--perform-rl-step",
)  # fmt: skip
"""Flags that let a checkpoint, a file or a pattern decide what other flags say."""


WITHOUT_TRAINING = re.compile(
    r"inference|text_generation|generate|convert|export|evaluate|validate|serve|^test_|merge|preprocess"
)
"""Names of Megatron's programs that only run a model, or change its files."""


@cache
def _of_deepspeed() -> frozenset[str]:
    """Flags that only Megatron-DeepSpeed has."""
    stock = megatron_catalogue(megatron_versions()[-1]).elsewhere
    return frozenset(megatron_deepspeed_catalogue().arguments) - frozenset(stock)


@cache
def _of_stock() -> frozenset[str]:
    """Flags that only Megatron-LM has; beside one an old flag that Megatron-DeepSpeed kept tells nothing."""
    stock = megatron_catalogue(megatron_versions()[-1]).elsewhere
    return frozenset(stock) - frozenset(megatron_deepspeed_catalogue().arguments)


@cache
def switches() -> frozenset[str]:
    """Flags that take no value in any version."""
    every = [*megatron_deepspeed_catalogue().arguments.values()]
    every += chain.from_iterable(megatron_catalogue(megatron_versions()[-1]).elsewhere.values())
    with_value = {flag for argument in every if argument.nargs != "0" for flag in argument.flags}
    return frozenset(flag for argument in every for flag in argument.flags) - with_value


class NotToldError(Exception):
    """A value that only a running shell, or a file elsewhere, would tell."""


def where_told(found: Iterator[Found]) -> Iterator[Found]:
    """What a check finds until it asks for a value that isn't told."""
    with suppress(NotToldError):
        yield from found


@dataclass(frozen=True)
class Run:
    """The arguments of one start of Megatron. Every accessor raises NotToldError where a value isn't told."""

    file: File
    arguments: Arguments
    settings: Settings
    program: str = ""
    """The script's name, without folders; empty where the arguments stand alone."""
    assumed: str = ""
    """A version of megatron-core that may be meant, where none is known."""

    @property
    def is_deepspeed(self) -> bool:
        """Whether it is Megatron-DeepSpeed: where a version of megatron-core is given, by --deepspeed alone."""
        names = self.arguments.names
        alike = not self.settings.megatron_version and names & _of_deepspeed() and not names & _of_stock()
        return "--deepspeed" in names or bool(alike)

    @property
    def version(self) -> str:
        """Of megatron-core: 0.16 means the newest 0.16.x; empty where it isn't known."""
        return self.assumed or named(self.settings.megatron_version, megatron_versions())

    @property
    def possible_versions(self) -> tuple[str, ...]:
        """The newest release of each series of megatron-core that has all flags of this run; none has a fork's."""
        newest = {release(version)[:2]: version for version in megatron_versions()}
        every = megatron_catalogue(megatron_versions()[-1]).elsewhere
        spans = [every.get(flag.name, ()) for flag in self.arguments.flags]
        return tuple(
            version for version in newest.values()
            if all(any(each.holds_for(version) for each in span) for span in spans)
        )  # fmt: skip

    @property
    def trains(self) -> bool:
        """Whether the program trains, as far as its name tells: no server, test or export of a model."""
        return not WITHOUT_TRAINING.search(self.program) and not self.arguments.has("--skip-train")

    @cached_property
    def whole(self) -> bool:
        """Whether a flag that isn't here isn't given."""
        after = (flag for flag in self.arguments.flags if flag.name in switches())
        hidden = any(not is_told(value) for flag in after for value in flag.values)  # --bf16 $MORE
        return self.arguments.complete and not hidden and not self.arguments.has(*_ELSEWHERE)

    def on(self, *flags: str) -> bool:
        """Whether one of these flags is given."""
        if not self.arguments.has(*flags) and not self.whole:
            raise NotToldError(flags[0])
        return self.arguments.has(*flags)

    def text(self, flag: str, default: str = "") -> str:
        """The last value of `flag`, or what the parser takes for it."""
        if not self.on(flag):
            return default
        value = self.arguments.value(flag)
        if value is None or not is_told(value):
            raise NotToldError(flag)
        return value

    def texts(self, flag: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        """All values of `flag`."""
        if not self.on(flag):
            return default
        found = self.arguments.flag(flag)
        assert found is not None
        if not all(is_told(value) for value in found.values):
            raise NotToldError(flag)
        return found.values

    def size(self, flag: str, default: int | None = None) -> int:
        """The last value of `flag` as a whole number; NotToldError where it is none: another rule's matter."""
        try:
            return int(self.text(flag, "" if default is None else str(default)))
        except ValueError:
            raise NotToldError(flag) from None

    def number(self, flag: str, default: float | None = None) -> float:
        """The last value of `flag` as a number."""
        try:
            return float(self.text(flag, "" if default is None else str(default)))
        except ValueError:
            raise NotToldError(flag) from None

    def environment(self, name: str) -> str | None:
        """The value that the same script gives to a variable; None where it gives none."""
        values = [each.value for each in self.file.assignments if each.name == name]
        if values and not is_told(values[-1]):
            raise NotToldError(name)
        return values[-1] if values else None

    def at(self, *flags: str) -> Position:
        """Where the last of these flags stands, or the first one there is."""
        found = self.arguments.flag(*flags) or next(iter(self.arguments.flags), None)
        return found.at if found else self.arguments.position()

    def hit(self, flags: str | tuple[str, ...], message: str, fix: str) -> Hit:
        """A finding at the last of these flags that is given."""
        return Hit(self.file.name, self.at(*((flags,) if isinstance(flags, str) else flags)), message, fix)

    def hit_at(
        self,
        flag: Flag,
        message: str,
        fix: str,
        *,
        severity: Severity | None = None,
        edit: Edit | None = None,
    ) -> Hit:
        """A finding at one flag."""
        return Hit(self.file.name, flag.at, message, fix, severity, edit=edit)

    def between(self, since: str, before: str) -> bool:
        """Whether the version is from `since` on and older than `before`; False where that isn't known."""
        if not self.version:
            return not since and not before
        known = release(self.version)
        return (not since or release(since) <= known) and (not before or known < release(before))

    @property
    def world(self) -> int:
        """Ranks in all."""
        if self.on("--llm-dp"):
            # examples/mimo hands over the language model's replicas alone (pretrain_mimo.py, core_v0.19.0).
            return self.size("--llm-dp", 1) * self.tp * self.pp * self.cp
        if self.settings.world_size is None:
            raise NotToldError("world size")
        return self.settings.world_size

    @property
    def tp(self) -> int:
        """Tensor-parallel size."""
        return self._degree("--tensor-model-parallel-size")

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return self._degree("--pipeline-model-parallel-size")

    @property
    def cp(self) -> int:
        """Context-parallel size."""
        return self._degree("--context-parallel-size")

    @property
    def ulysses(self) -> int:
        """Ranks that share a sequence, of Megatron-DeepSpeed."""
        return self._degree("--ds-sequence-parallel-size") if self.is_deepspeed else 1

    @property
    def ep(self) -> int:
        """Expert-parallel size."""
        return self._degree("--expert-model-parallel-size")

    @property
    def experts(self) -> int:
        """Experts of a layer; 0 where it has none."""
        return self.size("--num-experts", 0)

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert."""
        return self.size("--expert-tensor-parallel-size", self.tp)

    def _degree(self, flag: str) -> int:
        """A degree of parallelism; 0 and less are flags.value's matter."""
        size = self.size(flag, 1)
        if size < 1:
            raise NotToldError(flag)
        return size


def runs(files: FileSet, settings: Settings) -> Iterator[Run]:
    """Every start of Megatron-LM or Megatron-DeepSpeed among the files."""
    for file in files.of("megatron_args"):
        yield Run(file, file.value, settings)
    for file, command in files.launches():
        if is_megatron(command):
            script = command.script.text if command.script else ""
            for arguments in passes_of(file, command):
                yield Run(file, arguments, settings, script.rpartition("/")[2])


def passes_of(file: File, command: CommandLine) -> Iterator[Arguments]:
    """The arguments in each pass of the loop around the command, where they differ by its variable alone."""
    script, given = file.value, arguments_of(command)
    if file.inside or not script.passes:
        yield given
        return
    lines = file.places
    filled: dict[int, Passes] = {}
    for index, flag in enumerate(given.flags):
        value = flag.values[0] if len(flag.values) == 1 else ""
        held = loops.filled(value, script.passes, lines.offset(flag.at)) if "$" in value else None
        if held is not None and not held.reaches:
            filled[index] = held
    around = {(held.name, held.start) for held in filled.values()}
    body = file.text[max((start for _, start in around), default=0) : lines.offset(command.at)]
    if len(around) != 1 or _LEAVES_OUT.search(body):
        yield given
        return
    for turn in range(min(_MOST_PASSES, len(next(iter(filled.values())).values))):
        flags = (
            replace(flag, values=(filled[index].values[turn],)) if index in filled else flag
            for index, flag in enumerate(given.flags)
        )
        yield replace(given, flags=tuple(flags))


_MOST_PASSES = 8
_LEAVES_OUT = re.compile(r"\b(?:continue|break|if|case)\b|&&|\|\|")
"""What a loop passes some of its values over with."""


def stock_runs(files: FileSet, settings: Settings) -> Iterator[Run]:
    """Those of Megatron-LM."""
    return (run for run in runs(files, settings) if not run.is_deepspeed)


def of_versions(run: Run, find: Callable[[Run], Iterator[Hit]]) -> Iterator[Hit]:
    """What `find` says of a run. Where its version isn't known: what it says for each version that has the flags,
    and as information what it says for the newest of them.
    """
    versions = () if run.version else run.possible_versions
    if not versions:
        yield from find(run)
        return
    found = [tuple(find(replace(run, assumed=version))) for version in versions]
    always = set.intersection(*({hit.at for hit in hits} for hits in found))
    for hit in found[-1]:
        if hit.at in always:
            yield hit
        else:
            yield replace(hit, severity="info", message=f"{hit.message} {_open(versions)}")


def _open(versions: tuple[str, ...]) -> str:
    return (
        f"This is said of core {versions[-1]}, and doesn't hold for each version that has these flags: "
        "--megatron-version tells which one runs."
    )


def deepspeed_runs(files: FileSet, settings: Settings) -> Iterator[Run]:
    """Those of Megatron-DeepSpeed."""
    return (run for run in runs(files, settings) if run.is_deepspeed)
