"""What a supervisor tells the outside of a run: a message to a webhook, and figures in a Prometheus text file.

Neither ever changes how the run goes: what cannot be told is said once, in the run's own output.
"""

from __future__ import annotations

import json
import os
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dslaunch.errors import ConfigError
from dslaunch.planfile import Plan, SupervisionPlan
from dslaunch.run.attempts import attempt_of
from dslaunch.run.folder import write_file
from dslaunch.run.lines import number, row_of
from dslaunch.run.records import furthest, read_ranks
from dslaunch.run.state import read_state
from dslaunch.run.tracking import Tracker

_EVERY_S = 15.0
_ANSWER_LIMIT_S = 10.0
_TAIL_BYTES = 1 << 16
_HELP = {
    "up": "1 while the run is supervised.",
    "attempt": "Starts of the run, this one included.",
    "step": "Last step that every rank completed.",
    "ranks_started": "Ranks that have started.",
    "ranks_failed": "Ranks that have failed.",
}


@dataclass
class Notifier:
    """Of one run."""

    run_dir: Path
    wanted: SupervisionPlan
    echo: Callable[[str], None]
    tracker: Tracker
    _written: float = field(default=-_EVERY_S, init=False)
    _silenced: bool = field(default=False, init=False)
    _unwritten: bool = field(default=False, init=False)

    def tell(self, kind: str, text: str, **details: Any) -> None:
        """Send a message, where notify.webhook names the variable that holds an address.

        The body is JSON: run, kind, text and details; chat services show `text`.
        """
        self.tracker.tell(kind, text)
        if not self.wanted.webhook or self._silenced:
            return
        body = {
            "run": self.run_dir.name,
            "kind": kind,
            "text": f"{self.run_dir.name}: {text}",
            "details": details,
        }
        try:
            request = urllib.request.Request(
                os.environ[self.wanted.webhook],
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            urllib.request.urlopen(request, timeout=_ANSWER_LIMIT_S).close()
        except KeyError:
            self._silence("is not set")
        except ValueError:  # its text has the address
            self._silence("holds no address such as https://HOST/PATH")
        except OSError as error:
            self._silence(f"leads nowhere: {error}")

    def _silence(self, why: str) -> None:
        self._silenced = True
        self.echo(f"notify.webhook: {self.wanted.webhook} {why}; nothing more is sent")

    def write(self, *, up: bool = True, now: bool = False) -> None:
        """Replace the text file, at most every 15 s, and log to W&B what is new.

        Args:
            up: whether the run goes on.
            now: at once.
        """
        if not now and time.monotonic() - self._written < _EVERY_S:
            return
        self._written = time.monotonic()
        self.tracker.write()
        if not self.wanted.prometheus_dir:
            return
        place = Path(self.wanted.prometheus_dir) / f"dslaunch-{self.run_dir.name}.prom"
        try:
            write_file(place, "".join(_lines(self.run_dir, up)))
        except ConfigError as error:
            if not self._unwritten:
                self.echo(f"notify.prometheus_dir: {error}")
            self._unwritten = True


def notifier(run_dir: Path, plan: Plan, echo: Callable[[str], None]) -> Notifier:
    """That of a run; a relative folder starts from where the run was launched."""
    folder = plan.supervision.prometheus_dir
    place = str(Path(read_state(run_dir).work_dir, folder)) if folder else ""
    tracker = Tracker(run_dir, plan, echo)
    return Notifier(run_dir, replace(plan.supervision, prometheus_dir=place), echo, tracker)


def _lines(run_dir: Path, up: bool) -> Iterator[str]:
    """The text format 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats/."""
    ranks = read_ranks(run_dir / "ranks")
    figures: dict[str, float] = {
        "up": int(up),
        "attempt": attempt_of(run_dir),
        "step": furthest(ranks),
        "ranks_started": len(ranks),
        "ranks_failed": sum(1 for each in ranks if each.status),
    }
    for name, value in figures.items():
        yield f"# HELP dslaunch_{name} {_HELP[name]}\n" + _gauge(name, value, run_dir)
    for name, value in _last_metrics(run_dir / "metrics.jsonl").items():
        yield _gauge(f"train_{name}", value, run_dir)


def _gauge(name: str, value: float, run_dir: Path) -> str:
    label = run_dir.name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'# TYPE dslaunch_{name} gauge\ndslaunch_{name}{{run="{label}"}} {value}\n'


def _last_metrics(path: Path) -> dict[str, float]:
    """The numbers of the last whole line, by a name that Prometheus takes; none where there is no file."""
    if not path.exists():
        return {}
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = stream.read().split(b"\n")[:-1]
    row = row_of(lines[-1]) if lines else None
    figures = {re.sub(r"[^a-zA-Z0-9_]", "_", name): number(value) for name, value in (row or {}).items()}
    return {name: value for name, value in figures.items() if value is not None}
