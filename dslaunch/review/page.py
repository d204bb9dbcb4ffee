"""`dslaunch plan` as a page: layout, batch, memory, time, candidates, findings."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dslaunch.hardware.topology import describe
from dslaunch.planfile import Candidate, EarlierRun, Finding, Plan, Prediction
from dslaunch.planfile.plan import Setting
from dslaunch.schema.config import RunConfig

_PIPED_COLUMNS = 120
_TEXT = ("component", "layout", "verdict")
_STYLES = {"error": "bold red", "hang": "bold red", "memory": "yellow", "wrong": "yellow", "slow": "yellow"}


class _Page(Console):
    """A console that leaves a closed output to the command line."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(config: RunConfig, plan: Plan, prediction: Prediction, explanation: Sequence[str] = ()) -> None:
    """Print the page; plain and 120 columns wide where the output is no terminal."""
    chosen = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = _Page(highlight=False, width=None if chosen else _PIPED_COLUMNS)
    others = f" (or {', '.join(plan.engines[1:])})" if len(plan.engines) > 1 else ""
    console.print(Text(f"{plan.recipe} on {describe(config.cluster)}", style="bold"))
    console.print(f"engine {plan.engine.name} {plan.engine.version}{others}, {plan.training.precision}, "
                  f"strategy {plan.strategy}", soft_wrap=True)  # fmt: skip
    for line in _modes_lines(plan):
        console.print(line, soft_wrap=True, markup=False)
    for table in (_layout(plan), _memory(plan, prediction)):
        console.print()
        console.print(table)
    console.print()
    console.print(_peak(plan, prediction), soft_wrap=True)
    console.print()
    console.print(_time(plan, prediction), soft_wrap=True)
    if prediction.checkpoint:
        console.print(prediction.checkpoint.describe(), soft_wrap=True, markup=False)
    for line in _calibration_lines(prediction):
        console.print(line, soft_wrap=True, markup=False)
    _show_candidates(console, prediction)
    _show_search(console, prediction)
    _show_findings(console, prediction)
    for sentence in explanation:
        console.print()
        console.print(sentence, soft_wrap=not console.is_terminal, markup=False)


def _modes_lines(plan: Plan) -> list[str]:
    """What the engine does beside the layout, a line a mode; settings that are off are left out."""
    lines = []
    for name, settings in plan.engine.modes.items():
        said = [_setting(key, value) for key, value in settings.items() if value is not False]
        lines.append(f"with {name}" + (f": {', '.join(said)}" if said else ""))
    if plan.engine.extra:
        lines.append(f"with engine.extra: {json.dumps(plan.engine.extra, sort_keys=True)}")
    return lines


def _setting(key: str, value: Setting) -> str:
    return key if value is True else f"{key} {value}"


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", show_edge=False, box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXT else "right", overflow="fold")
    return table


def _layout(plan: Plan) -> Table:
    table = _table(
        f"Layout: {plan.global_batch} samples a step = micro-batch x micro-batches x dp",
        "component", "params", "tp", "pp", "dp", "ZeRO", "ranks", "recompute", "batch",
    )  # fmt: skip
    for name, c in plan.components.items():
        trains = "" if c.trainable else " frozen"
        degrees = "".join(f" {k} {v}" for k, v in (("vpp", c.vpp), ("cp", c.cp), ("ep", c.ep)) if v > 1)
        degrees += f" etp {c.etp}" if c.etp else ""
        offload = "" if c.offload == "none" else f" +{c.offload}"
        table.add_row(
            name, f"{_count(c.params)}{trains}", str(c.tp), f"{c.pp}{degrees}", str(c.dp), f"{c.zero}{offload}",
            f"{c.rank_offset}-{c.rank_offset + c.ranks - 1}", c.recompute,
            f"{c.micro_batch} x {c.num_microbatches} x {c.dp}",
        )  # fmt: skip
    return table


def _memory(plan: Plan, prediction: Prediction) -> Table:
    terms = ("weights", "gradients", "optimizer", "activations", "boundary", "logits", "buffers", "total")
    short = ("weight", "grad", "optim", "activ", "bound", "logits", "buffer", "total")
    largest = max(stage.memory_gib.total for stages in prediction.components.values() for stage in stages)
    unit, scale = ("GiB", 1) if largest >= 1 else ("MiB", 1024)
    table = _table(f"Memory, {unit} on one {_device(plan)}", "component", "params", *short)
    for name, stages in prediction.components.items():
        for decided, predicted in zip(plan.components[name].stages, stages, strict=True):
            row = vars(predicted.memory_gib)
            scaled = [row[term] * scale for term in terms]
            figures = [f"{figure:.1f}" if figure >= 0.05 else "." for figure in scaled]
            label = name if len(stages) == 1 else f"{name} stage {decided.stage}"
            table.add_row(label, _count(decided.params_on_rank), *figures)
    return table


def _peak(plan: Plan, prediction: Prediction) -> str:
    parts: dict[str, float] = {}
    for term, gib in prediction.worst.memory_gib.items():
        owner = term.split("/")[0]
        parts[owner] = parts.get(owner, 0.0) + gib
    shown = " + ".join(f"{owner} {gib:.1f}" for owner, gib in parts.items())
    host = f"; host {prediction.host_memory_gib:.0f} of {prediction.host_limit_gib:.0f} GiB a node"
    where = _device(plan)
    return (
        f"fullest {where}: rank {prediction.worst.rank}: {shown} = {prediction.peak_memory_gib:.1f} of "
        f"{prediction.memory_limit_gib:.1f} GiB (the {where} has {prediction.gpu_memory_gib:g}){host}"
    )


def _device(plan: Plan) -> str:
    return "process" if plan.cluster.accelerator == "cpu" else "GPU"


def _time(plan: Plan, prediction: Prediction) -> str:
    steps, usd = plan.training.steps, prediction.usd_per_step
    price = "" if usd is None else f", ${usd * steps:,.0f}"
    return (
        f"step {_seconds(prediction.step_time_s)}, {prediction.tokens_per_s:,.0f} tokens/s, "
        f"{prediction.samples_per_s:,.3g} samples/s, MFU {prediction.mfu:.1%}, HFU {prediction.hfu:.1%}, "
        f"bubble {prediction.bubble:.1%}; {steps:,} steps "
        f"{_seconds(prediction.step_time_s * steps)}{price} ({prediction.band}; loading data not counted)"
    )


def _calibration_lines(prediction: Prediction) -> list[str]:
    """What the site's own runs corrected, and what runs of this very plan measured."""
    found = prediction.calibration
    if found is None:
        return []
    return [
        f"corrected by efficiency.yaml for {found.key}: time x{found.time:.3g}, memory x{found.memory:.3g} "
        f"(runs: {found.runs}, of different plans: {found.plans})",
        *(
            f"measured in {run.run}: step {_seconds(run.step_time_s)}, predicted "
            f"{_seconds(prediction.step_time_s)}" + _allocated(run, prediction)
            for run in found.measured
        ),
    ]


def _allocated(run: EarlierRun, prediction: Prediction) -> str:
    if run.allocated_gib is None:
        return ""
    return f"; allocated {run.allocated_gib:.1f} GiB, predicted {prediction.allocated_gib:.1f}"


def _count(params: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if params >= size:
            return f"{params / size:.3g}{unit}"
    return str(params)


def _seconds(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"


def _show_candidates(console: Console, prediction: Prediction) -> None:
    if len(prediction.candidates) < 2:
        return
    console.print()
    console.print(_candidates("Candidates", prediction.candidates))


def _candidates(title: str, rows: Sequence[Candidate]) -> Table:
    table = _table(title, "layout", "GiB", "step", "verdict")
    for candidate in rows:
        known = candidate.step_time_s > 0
        table.add_row(
            candidate.layout, f"{candidate.peak_memory_gib:.1f}" if known else "",
            _seconds(candidate.step_time_s) if known else "", candidate.verdict,
        )  # fmt: skip
    return table


def _show_search(console: Console, prediction: Prediction) -> None:
    """The goal, the engines, and the front."""
    search = prediction.search
    if search is None:
        return
    console.print()
    console.print(f"goal {search.goal}; {search.considered:,} layouts covered", soft_wrap=True)
    for engine, verdict in search.engines.items():
        console.print(f"engine {engine}: {verdict}", soft_wrap=True, markup=False)
    console.print()
    console.print(_candidates("Least memory for each step time", search.front))


def _show_findings(console: Console, prediction: Prediction) -> None:
    for finding in prediction.findings:
        console.print()
        console.print(_finding(finding), soft_wrap=not console.is_terminal)


def _finding(finding: Finding) -> Text:
    text = Text()
    text.append(finding.severity, style=_STYLES.get(finding.severity, "bold"))
    text.append(f": {finding.message} [{finding.rule}]")
    if finding.fix:
        text.append(f"\n  fix: {finding.fix}")
    return text
