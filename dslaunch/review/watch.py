"""`dslaunch watch`: one page of a run that fits a terminal, at 8 ranks as at 1,024."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dslaunch.review.measured import measured
from dslaunch.run.attempts import logs_of
from dslaunch.run.now import ENDED
from dslaunch.run.records import RankRecord
from dslaunch.run.state import read_events
from dslaunch.run.status import (
    Status,
    age,
    plan_words,
    rank_words,
    read_status,
    status_lines,
    status_object,
    step_words,
)

_PIPED_COLUMNS = 120
_EVENTS = 5
_LONG = ("files", "argv")
"""Details of events that take more than a line."""
_LOG_LINES = 8
_MAP_ROWS = 16
"""Rows of the rank map, at most; with more ranks a cell stands for several."""
_LEGEND = "#: at the run's step  -: behind  .: no step yet  o: done  x: failed  ?: killed"
_WORST_FIRST = "x?-.#o"
_STYLES = {"x": "bold red", "?": "bold red", "-": "yellow", "#": "green", "o": "dim green", ".": "dim"}
_STANDING = {"running": "green", "finished": "green", "failed": "bold red", "lost": "bold red"}
_TAIL_BYTES = 1 << 16


def show_once(folder: Path) -> None:
    """Print one frame; plain and 120 columns wide where the output is no terminal."""
    chosen = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if chosen else _PIPED_COLUMNS)
    console.print(page(read_status(folder), console.width))


def watch_json(folder: Path, every_s: float, *, once: bool) -> None:
    """Print a line of JSON for each look at the run (`review.outputs_run.Frame`), until it has ended."""
    while True:
        status = read_status(folder)
        sys.stdout.write(json.dumps(frame(status)) + "\n")
        sys.stdout.flush()
        if once or status.now.standing in ENDED:
            break
        time.sleep(every_s)


def frame(status: Status) -> dict[str, Any]:
    """What the page shows, as data."""
    found = measured(status.folder)
    return {
        "schema": "dslaunch.frame/1",
        "status": status_object(status),
        "measured": found.steps[-1] if found and found.steps else None,
        "events": read_events(status.folder)[-_EVENTS:],
        "log": _said(status),
    }


def watch(folder: Path, every_s: float) -> None:
    """Show the page, renewed every `every_s` seconds, until the run has ended; Ctrl-C leaves the run alone."""
    console = Console(highlight=False)
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            status = read_status(folder)
            live.update(page(status, console.width), refresh=True)
            if status.now.standing in ENDED:
                break
            time.sleep(every_s)
    if console.is_terminal:
        console.print(page(status, console.width))


def page(status: Status, width: int) -> RenderableType:
    """The whole page: what it is, how far, each rank, what happened, what was said last."""
    standing = status.now.standing
    head = Text(f"{status.folder.name}  {plan_words(status.plan)}", style="bold")
    state = Text(f"{standing}  {status.now.why}".rstrip(), style=_STANDING.get(standing, "yellow"))
    parts: list[RenderableType] = [head, state, _progress(status, width), _figures(status), Text()]
    if status.ranks:
        parts += [Text(f"ranks  {rank_words(status)}"), rank_map(status, width)]
        parts += [Text(_LEGEND, style="dim"), Text()]
    parts += [_events(status), Text()]
    parts += [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in _said(status)]
    return Group(*parts)


def rank_map(status: Status, width: int) -> Text:
    """A character for each rank, a line for each node where nodes fit; the worst of several where they don't."""
    kinds = {each.rank: _kind(each, status) for each in status.ranks}
    marks = [kinds.get(rank, ".") for rank in range(status.plan.world_size)]
    a_node = status.plan.cluster.gpus_per_node
    nodes = [marks[first : first + a_node] for first in range(0, len(marks), a_node)]
    across = max(1, min((width - 8) // (a_node + 1), math.ceil(len(nodes) / _MAP_ROWS)))
    if across * _MAP_ROWS < len(nodes):
        return _folded(marks, width)
    text = Text()
    for first in range(0, len(nodes), across):
        text.append(f"{first * a_node:>6} ", style="dim")
        for node in nodes[first : first + across]:
            for mark in node:
                text.append(mark, style=_STYLES[mark])
            text.append(" ")
        text.append("\n")
    text.right_crop(1)
    return text


def _folded(marks: list[str], width: int) -> Text:
    """Each character stands for the worst of several ranks."""
    per_row = width - 8
    each = math.ceil(len(marks) / (per_row * _MAP_ROWS))
    cells = [min(marks[i : i + each], key=_WORST_FIRST.index) for i in range(0, len(marks), each)]
    text = Text(f"each character is the worst of {each} ranks\n", style="dim")
    for first in range(0, len(cells), per_row):
        text.append(f"{first * each:>6} ", style="dim")
        for mark in cells[first : first + per_row]:
            text.append(mark, style=_STYLES[mark])
        text.append("\n")
    text.right_crop(1)
    return text


def _kind(record: RankRecord, status: Status) -> str:
    if record.status is not None:
        return "x" if record.status else "o"
    if status.now.standing in ENDED:
        return "?"
    if record.step is None:
        return "."
    return "-" if record.rank in status.behind else "#"


def _progress(status: Status, width: int) -> RenderableType:
    steps = status.plan.training.steps
    left = ""
    if status.step and status.steps_per_s and status.now.standing == "running":
        left = f", {age((steps - status.step) / status.steps_per_s)} to go"
    row = Table.grid(padding=(0, 1))
    row.add_row(
        ProgressBar(total=steps, completed=status.step or 0, width=min(40, width // 3)),
        Text(f"step {step_words(status) or 'none yet'}{left}"),
    )
    return row


def _figures(status: Status) -> Text:
    """What the runtime measured last, and the lines of `status` that the page does not show elsewhere."""
    found = measured(status.folder)
    told = dict(status_lines(status))
    words = [f"{name} {told[name]}" for name in ("attempt", "where", "checkpoint") if name in told]
    if found and found.steps:
        last = found.steps[-1]
        words.insert(0, f"loss {last['loss']:.4g}  {last['tokens_per_s']:,.0f} tokens/s")
    failures = [f"\n{name}: {told[name]}" for name in ("first failure", "next") if name in told]
    return Text("  ".join(words) + "".join(failures))


def _events(status: Status) -> Text:
    """The newest events, a line each."""
    lines = []
    for event in read_events(status.folder)[-_EVENTS:]:
        details = {key: value for key, value in event["details"].items() if value and key not in _LONG}
        shown = ", ".join(f"{key} {value}" for key, value in details.items())
        lines.append(f"{event['time'][11:19]}  {event['kind']}  {shown}")
    return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


def _said(status: Status) -> list[str]:
    """The last lines of the common log of this attempt."""
    logs = logs_of(status.folder, status.attempt)
    found = [path for path in (logs / "launcher.log", *logs.glob("slurm-*.out")) if path.is_file()]
    if not found:
        return []
    with max(found, key=lambda path: path.stat().st_mtime_ns).open("rb") as stream:
        stream.seek(max(0, stream.seek(0, 2) - _TAIL_BYTES))
        tail = stream.read().decode(errors="replace")
    printable = ["".join(c for c in line if c.isprintable()) for line in tail.splitlines()]
    return printable[-_LOG_LINES:]
