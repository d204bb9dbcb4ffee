"""What Megatron-LM refuses of combined flags, as rows of tables: a row is a condition, from version to version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.megatron.forks import of_fork
from dslaunch.rules.megatron.run import Run, of_versions, stock_runs, where_told
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

ARGUMENTS = "NVIDIA/Megatron-LM:megatron/training/arguments.py validate_args"
CONFIG = "megatron/core/transformer/transformer_config.py __post_init__"
RUN = "core_v0.12.3, 0.13.1, 0.14.0, 0.15.3, 0.16.1, 0.17.1, 0.18.2 and 0.19.0, run"


@dataclass(frozen=True)
class Demand:
    """One check of Megatron's. Without `since` and `before` each version that has the flag makes it."""

    flag: str | tuple[str, ...]
    """Where the finding stands."""
    refused: Callable[[Run], bool]
    """Whether Megatron stops; raises NotToldError where that isn't told."""
    message: str
    fix: str
    since: str = ""
    """The first version of megatron-core that checks it."""
    before: str = ""
    """The first that no longer does."""

    def hits(self, run: Run, stops: str) -> Iterator[Hit]:
        """The finding, where the version makes this check and refuses the run; raises NotToldError."""
        if run.between(self.since, self.before) and self.refused(run):
            yield run.hit(self.flag, self.message_for(run, stops), self.fix)

    def message_for(self, run: Run, stops: str) -> str:
        """The message with the versions that it holds for; of an assumed version others may say the same."""
        if run.assumed:
            return f"{self.message}; {stops}."
        span = f"since core {self.since}" if self.since else ""
        if self.before:
            span = f"{span} and before core {self.before}" if span else f"before core {self.before}"
        return f"{self.message}; {stops}{f' ({span})' if span else ''}."


def demands(
    rule_id: str,
    summary: str,
    table: Sequence[Demand],
    *,
    evidence: str = f"{ARGUMENTS} at {RUN}",
    stops: str = "Megatron stops at start-up",
) -> None:
    """Register one rule that checks every row of a table; `stops` says when a refused run ends."""

    def find(run: Run) -> Iterator[Hit]:
        for demand in table:
            yield from where_told(demand.hits(run, stops))

    def check(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
        for run in stock_runs(files, settings):
            yield from of_fork(run, of_versions(run, find))

    check.__doc__ = summary
    rule(rule_id, severity="error", raised_by="megatron", evidence=evidence, framework="megatron")(check)
