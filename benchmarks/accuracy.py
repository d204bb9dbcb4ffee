"""`python -m benchmarks.accuracy`: how far predictions are from published runs, cross-validated.

python -m benchmarks.accuracy                  the whole report
python -m benchmarks.accuracy --targets        the table of targets alone
python -m benchmarks.accuracy --write          docs/accuracy.md, its plots, and the bands that plans print, too
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from benchmarks.crossval import Held, all_errors, held_out
from benchmarks.errors import Error
from benchmarks.peers import peers
from benchmarks.predict import ledger
from benchmarks.records import Record, published
from benchmarks.regret import sweeps
from benchmarks.statistics import Summary, by, over_sources, source_of, summary
from benchmarks.targets import targets

_GROUPS: dict[str, Callable[[Record], str]] = {
    "source": source_of,
    "GPU": lambda record: record.gpu.type or "unknown",
    "framework": lambda record: record.framework,
    "kind": lambda record: record.category,
}


def main(arguments: Sequence[str]) -> int:
    """Print the report, or write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--targets", action="store_true", help="the table of targets alone")
    parser.add_argument(
        "--write", action="store_true", help="write docs/accuracy.md, its plots, and the bands"
    )
    asked = parser.parse_args(arguments)
    held = held_out(published())
    if asked.write:
        from benchmarks import page  # its plots need matplotlib

        page.write(held)
    lines = target_lines(held)
    print("\n".join(lines if asked.targets else [*lines, *report_lines(held)]))
    return 0


def target_lines(held: Sequence[Held]) -> list[str]:
    """Target, what is reached, and whether that is enough."""
    lines = ["Error per source, averaged over sources; no source calibrates its own prediction", ""]
    for target in targets(held):
        sign = ">=" if target.at_least else "<="
        lines.append(
            f"{target.name:46} {target.shown:>7}   {sign} {target.wanted:6.2%}   {'' if target.met else 'missed'}"
        )
    return lines


def report_lines(held: Sequence[Held]) -> list[str]:
    """Errors by source, GPU, framework and kind; what fits, regret, peers, and the worst with their ledgers."""
    found = all_errors(held)
    lines: list[str] = []
    for kind in ("memory", "time"):
        of_kind = [error for error in found if error.kind == kind]
        for name, key in _GROUPS.items():
            lines += ["", f"{kind} by {name}", *_table(by(of_kind, key))]
        if whole := over_sources(of_kind):
            lines.append(_row("averaged over sources", whole))
    lines += ["", "fits and OOM", *_confusion(held), "", "refused", *_refusals(held)]
    lines += ["", "regret by sweep"]
    lines += [f"{s.regret:7.1%}  {s.runs:3d} runs  {s.name}: {s.picked}, best {s.best}" for s in sweeps(held)]
    lines += ["", "peers, on the rows that they support", *_peers(found)]
    return [*lines, "", "the worst 20", *_worst(found)]


def _table(groups: dict[str, list[Error]]) -> list[str]:
    header = f"{'':60} {'count':>5} {'median':>7} {'mean':>7} {'p90':>7} {'worst':>7} {'bias':>7}"
    return [header, *(_row(name, s) for name, group in groups.items() if (s := summary(group)))]


def _row(name: str, s: Summary) -> str:
    figures = "".join(f" {value:7.1%}" for value in (s.median, s.mean, s.p90, s.worst))
    return f"{name[:60]:60} {s.count:5d}{figures} {s.bias:+7.1%}"


def _confusion(held: Sequence[Held]) -> list[str]:
    lines = []
    for fact in ("fits", "oom"):
        known = [
            h for h in held
            if h.predicted.refused is None
            and (bool(h.record.measured.oom) if fact == "oom" else fact in h.record.tags)
        ]  # fmt: skip
        right = [h for h in known if h.predicted.fits == (fact == "fits")]
        wrong = [h.record.id for h in known if h not in right]
        lines.append(
            f"{fact:5} {len(right)} of {len(known)} called so; wrong: {', '.join(wrong[:40]) or 'none'}"
        )
    return lines


def _refusals(held: Sequence[Held]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for each in held:
        if each.predicted.refused:
            reasons.setdefault(each.predicted.refused, []).append(each.record.id)
    return [f"{len(ids):4d}  {reason}: {', '.join(ids[:6])}" for reason, ids in reasons.items()]


def _peers(found: Sequence[Error]) -> list[str]:
    lines = []
    for peer in peers():
        if peer.missing:
            lines.append(f"{peer.name}: not run: {peer.missing}")
            continue
        for kind in ("memory", "time"):
            theirs = peer.errors([error for error in found if error.kind == kind])
            supported = {error.record.id for error in theirs}
            ours = [error for error in found if error.kind == kind and error.record.id in supported]
            for name, rows in ((peer.name, theirs), ("dslaunch on the same rows", ours)):
                if s := summary(rows):
                    lines.append(_row(f"{kind}: {name}", s))
    return lines


def _worst(found: Sequence[Error], number: int = 20) -> list[str]:
    lines = []
    for error in sorted(found, key=lambda error: -abs(error.relative))[:number]:
        unit = "GiB" if error.kind == "memory" else "s"
        lines.append(
            f"{error.relative:+8.1%}  {error.record.id}: {error.kind}, predicted {error.predicted:.4g} {unit}, "
            f"measured {error.measured:.4g} ({error.quantity})"
        )
        lines.append(f"          {ledger(error.record, error.kind)}")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
