"""`dslaunch plan` as a page: layout, batch, memory, time, candidates, findings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dslaunch.hardware.topology import describe
from dslaunch.plan.space import order_words
from dslaunch.planfile import Candidate, Finding, Plan, Prediction
from dslaunch.planfile.plan import Setting
from dslaunch.review.columns import lines, width
from dslaunch.review.page_predicted import device, precision_words, rows, seconds
from dslaunch.schema.config import RunConfig

_PIPED_COLUMNS = 120
_MOST_STAGES = 16
"""Rows of a component; a longer pipeline is folded."""
_TEXT = ("component", "layout", "verdict")
_STYLES = {"error": "bold red", "hang": "bold red", "memory": "yellow", "wrong": "yellow", "slow": "yellow"}


class _Page(Console):
    """A console that leaves a closed output to the command line."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show(config: RunConfig, plan: Plan, prediction: Prediction, explanation: Sequence[str] = ()) -> None:
    """Print the page; plain and 120 columns wide where the output is no terminal."""
    console = _Page(highlight=False, width=width() or _PIPED_COLUMNS)
    others = f" (or {', '.join(plan.engines[1:])})" if len(plan.engines) > 1 else ""
    console.print(Text(f"{plan.recipe} on {describe(config.cluster)}", style="bold"))
    _say(
        console,
        f"engine {plan.engine.name} {plan.engine.version}{others}, {precision_words(plan)}, "
        f"strategy {plan.strategy}{_order(plan)}",
    )
    for line in _modes_lines(plan):
        _say(console, line)
    for table in (_layout(plan), _memory(plan, prediction)):
        console.print()
        console.print(table)
    too_large = prediction.peak_memory_gib > prediction.memory_limit_gib
    _show_rows(console, "Predicted", list(rows(plan, prediction)), "memory" if too_large else "")
    _show_candidates(console, prediction)
    _show_search(console, prediction)
    for finding in prediction.findings:
        console.print()
        _say(console, _finding(finding))
    for sentence in explanation:
        console.print()
        _say(console, sentence)


def _say(console: Console, words: str | Text) -> None:
    """A sentence, folded where the page has a width: on a terminal, or where COLUMNS is set."""
    console.print(words, soft_wrap=width() is None, markup=False)


def _show_rows(
    console: Console, title: str, found: Sequence[tuple[str, str]], wrong: str = ""
) -> None:
    """Two columns; the line that begins with the word `wrong` is red."""
    console.print()
    console.print(Text(title, style="bold"))
    for line in lines(found, width()):
        style = "bold red" if wrong and line.startswith(wrong) else ""
        console.print(Text(line, style=style), soft_wrap=True)


def _order(plan: Plan) -> str:
    """An order of micro-batches that the stages do not tell, such as `, schedule zb-h1`."""
    pipelined = any(component.pp > 1 for component in plan.components.values())
    words = order_words(plan.training.schedule) if pipelined else ""
    return f", schedule{words}" if words else ""


def _modes_lines(plan: Plan) -> list[str]:
    """What the engine does beside the layout, a line a mode (settings that are off are left out), and what the
    cluster's fabric calls for."""
    lines = []
    for name, settings in plan.engine.modes.items():
        said = [_setting(key, value) for key, value in settings.items() if value is not False]
        lines.append(f"with {name}" + (f": {', '.join(said)}" if said else ""))
    if plan.engine.extra:
        lines.append(f"with engine.extra: {json.dumps(plan.engine.extra, sort_keys=True)}")
    by_fabric: dict[str, list[str]] = {}
    for each in plan.fabric:
        by_fabric.setdefault(each.fabric, []).append(f"{each.name}={each.value}")
    lines += [f"for {fabric}: {' '.join(words)}" for fabric, words in by_fabric.items()]
    return lines + _environment_lines(plan) + _place_lines(plan)


def _environment_lines(plan: Plan) -> list[str]:
    """Names of the variables that every rank gets beside the fabric's; values of those handed over are nowhere."""
    lines = [f"environment of every rank: {', '.join(plan.env_names)}"] if plan.env_names else []
    if plan.launcher.pass_env:
        lines.append(f"handed over from the launching shell, by name: {', '.join(plan.launcher.pass_env)}")
    return lines


def _place_lines(plan: Plan) -> list[str]:
    """Which nodes hold the ranks in which order, and where the code stands, as far as that is asked for."""
    leaves = [f"{leaf} ({', '.join(hosts)})" for leaf, hosts in plan.cluster.switches.items()]
    lines = [f"ranks fill one leaf switch after the other: {', '.join(leaves)}"] if leaves else []
    launcher = plan.launcher
    lines += [f"SLURM {line}" for line in launcher.placement]
    if launcher.stage_to:
        lines.append(f"the code of {launcher.stage_from} is copied to {launcher.stage_to} on every node")
    return lines


def _setting(key: str, value: Setting) -> str:
    return key if value is True else f"{key} {value}"


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", show_edge=False, box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0), pad_edge=False,
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
    table = _table(f"Memory, {unit} on one {device(plan)}", "component", "params", *short)
    for name, stages in prediction.components.items():
        params = [decided.params_on_rank for decided in plan.components[name].stages]
        for part in _folded([stage.memory_gib.total for stage in stages]):
            most = [scale * max(getattr(stages[i].memory_gib, term) for i in part) for term in terms]
            figures = [f"{figure:.1f}" if figure >= 0.05 else "." for figure in most]
            table.add_row(
                f"{name}{_stages(part, len(stages))}", _count(max(params[i] for i in part)), *figures
            )
    return table


def _folded(totals: Sequence[float]) -> list[range]:
    """The stages of each row: one, but of a long pipeline those between the ends and the fullest together."""
    count = len(totals)
    alone = set(range(count))
    if count > _MOST_STAGES:
        alone = {0, 1, totals.index(max(totals)), count - 2, count - 1}
    starts = [i for i in range(count) if i in alone or i - 1 in alone]
    return [range(start, end) for start, end in pairwise([*starts, count])]


def _stages(part: range, count: int) -> str:
    if count == 1:
        return ""
    return f" stage {part[0]}" if len(part) == 1 else f" stages {part[0]}-{part[-1]}, at most"


def _count(params: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if params >= size:
            return f"{params / size:.3g}{unit}"
    return str(params)


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
            seconds(candidate.step_time_s) if known else "", candidate.verdict,
        )  # fmt: skip
    return table


def _show_search(console: Console, prediction: Prediction) -> None:
    """The goal, the engines, and the front."""
    search = prediction.search
    if search is None:
        return
    goal = f"Engines, {search.considered:,} layouts in all; goal {search.goal}"
    _show_rows(console, goal, list(search.engines.items()))
    console.print()
    console.print(_candidates("Least memory for each step time", search.front))


def _finding(finding: Finding) -> Text:
    text = Text()
    text.append(finding.severity, style=_STYLES.get(finding.severity, "bold"))
    text.append(f": {finding.message} [{finding.rule}]")
    if finding.fix:
        text.append(f"\n  fix: {finding.fix}")
    return text
