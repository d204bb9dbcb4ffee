"""`python -m benchmarks.holdout`: published runs that were collected after the model stood.

data/holdout.json has the records as their sources print them, each with the tag `HOLDOUT`;
data/holdout_first.jsonl what `python -m benchmarks.predict` printed for them at first sight, before anything
was changed; data/holdout_mends.yaml what turned out to be wrong or missing in a record afterwards, with the
evidence. No rate is derived from them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.crossval import Held, all_errors
from benchmarks.errors import Error
from benchmarks.predict import Predicted, predict
from benchmarks.records import DATA, Record, published, read
from benchmarks.statistics import by, over_sources, source_of, summary
from benchmarks.targets import confusion

RUNS = DATA / "holdout.json"
MENDS = DATA / "holdout_mends.yaml"
FIRST = DATA / "holdout_first.jsonl"
LEARNT = DATA / "holdout.md"


@dataclass(frozen=True)
class Sight:
    """What was foreseen of all records at one time."""

    held: tuple[Held, ...]

    @property
    def errors(self) -> list[Error]:
        return all_errors(self.held)


def first_sight() -> Sight:
    """The records as printed, with the predictions that were made before anybody had looked at them."""
    rows = map(json.loads, FIRST.read_text(encoding="utf-8").splitlines())
    foreseen = {row["id"]: Predicted(**row) for row in rows}
    return Sight(tuple(Held(record, foreseen[record.id]) for record in read(RUNS)))


def today() -> Sight:
    """The mended records, as they are predicted now."""
    return Sight(tuple(Held(record, predict(record)) for record in mended()))


def mended() -> list[Record]:
    """The records, with what was found out about them since."""
    return read(RUNS, MENDS)


def lines() -> list[str]:
    """The section of docs/accuracy.md, in Markdown."""
    first, now = first_sight(), today()
    records = [held.record for held in first.held]
    publishers = {record.source.repo for record in records}
    known = {record.source.repo for record in published()}
    return [
        "## Runs that nobody had looked at",
        "",
        f"{len(records)} runs of {len(publishers)} publishers that are not in the data above, nor in the",
        f"tables: {len(publishers - known)} of the publishers have nothing there, the others other pages.",
        "They were predicted once, with the shipped tables, before any of them was looked at (2026-11-30).",
        "`first` is that prediction, of the records as they had been written down; `now` is today's model and",
        "records, which were looked at.",
        "",
        *_table(first, now),
        "",
        *_facts(first, now),
        "",
        LEARNT.read_text(encoding="utf-8").rstrip(),
    ]


def _table(first: Sight, now: Sight) -> list[str]:
    times = [f"{figure}, {when}" for when in ("first", "now") for figure in ("median", "mean", "bias")]
    rule = "|---|---|" + "---:|" * (1 + len(times))
    out = [f"| source | figure | runs | {' | '.join(times)} |", rule]
    for kind in ("memory", "time"):
        before = [error for error in first.errors if error.kind == kind]
        after = by([error for error in now.errors if error.kind == kind], source_of)
        for name, group in by(before, source_of).items():
            out.append(_row(name, kind, group, after.get(name, [])))
        every = [error for group in after.values() for error in group]
        out.append(_over_sources(kind, before, every))
    return out


def _row(name: str, kind: str, before: Sequence[Error], after: Sequence[Error]) -> str:
    figures = [f"{s.median:.1%} | {s.mean:.1%} | {s.bias:+.1%}" for e in (before, after) if (s := summary(e))]
    return f"| {name} | {kind} | {len(before)} | {' | '.join(figures)} |"


def _over_sources(kind: str, before: Sequence[Error], after: Sequence[Error]) -> str:
    sums = filter(None, (over_sources(before), over_sources(after)))
    figures = [f"{s.median:.1%} | {s.mean:.1%} | {s.bias:+.1%}" for s in sums]
    return f"| averaged over sources | {kind} | {len(before)} | {' | '.join(figures)} |"


def _facts(first: Sight, now: Sight) -> list[str]:
    out = ["| fact | called so, first | called so, now |", "|---|---:|---:|"]
    for name in ("fitted", "ran out of memory"):
        counts = [f"{right} of {known}" for right, known in (confusion(s.held)[name] for s in (first, now))]
        out.append(f"| {name} | {' | '.join(counts)} |")
    refused = [str(sum(held.predicted.refused is not None for held in s.held)) for s in (first, now)]
    return [*out, f"| refused | {' | '.join(refused)} |"]


def main() -> int:
    """Print the section, and every run's error now."""
    print("\n".join(lines()))
    print()
    for error in sorted(today().errors, key=lambda e: -abs(e.relative)):
        print(f"{error.relative:+8.1%}  {error.kind:6}  {error.record.id}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
