"""Tables of pages: a row for each `dslaunch plan` command, with figures of its --json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.command import Ran

Json = dict[str, Any]


def table(plans: Sequence[tuple[str, Ran]], columns: Sequence[str]) -> str:
    """A Markdown table; the first cell of a row is what its command has and others have not."""
    assert plans, "no `dslaunch plan` command stands before the figures"
    heads = ["", *(_COLUMNS[name][0] for name in columns)]
    cells = [[_COLUMNS[name][1](ran.json) for name in columns] for _, ran in plans]
    rows = [[label, *row] for label, row in zip(_labels(plans), cells, strict=True)]
    lines = [heads, ["---", *("---:" for _ in columns)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _labels(plans: Sequence[tuple[str, Ran]]) -> list[str]:
    split = [command.split()[2:] for command, _ in plans]
    common = set(split[0]).intersection(*split[1:]) if len(split) > 1 else set()
    return [f"`{' '.join(word for word in words if word not in common) or 'as it stands'}`" for words in split]


def term(plan: Json, *names: str) -> float:
    """GiB of these terms on the fullest GPU, over its components."""
    return sum(gib for key, gib in plan["worst"]["memory_gib"].items() if key.rpartition("/")[2] in names)


def seconds(plan: Json, *names: str) -> float:
    """Seconds of these terms in the stage that takes longest."""
    stages = [stage["time_s"] for each in plan["components"].values() for stage in each["stages"]]
    slowest = max(stages, key=lambda time: sum(time.values()))
    return float(sum(slowest[name] for name in names))


def trunk(plan: Json) -> Json:
    """The component with most parameters."""
    found: Json = max(plan["components"].values(), key=lambda each: each["params"])
    return found


def _layout(plan: Json) -> str:
    at = trunk(plan)
    degrees = [f"{name.upper()}{at[name]}" for name in ("tp", "cp", "ep", "pp", "dp") if at[name] > 1]
    sharded = plan["engine"]["sharding"]
    return " ".join([*degrees, f"ZeRO-{at['zero']}" if sharded == "zero" else sharded.upper()])


def _gib(*names: str) -> Callable[[Json], str]:
    return lambda plan: f"{term(plan, *names):.1f}"


def _share(*names: str) -> Callable[[Json], str]:
    return lambda plan: f"{seconds(plan, *names) / plan['step_time_s']:.1%}"


def _time(value: float) -> str:
    return f"{value:.3g} s" if value < 100 else f"{value / 60:.3g} min"


_COLUMNS: dict[str, tuple[str, Callable[[Json], str]]] = {
    "memory": ("memory, GiB", lambda plan: f"{plan['peak_memory_gib']:.1f}"),
    "fits": ("fits", lambda plan: "yes" if plan["peak_memory_gib"] <= plan["memory_limit_gib"] else "no"),
    "weights": ("weights", _gib("weights")),
    "gradients": ("gradients", _gib("gradients")),
    "optimizer": ("optimizer", _gib("optimizer")),
    "states": ("states", _gib("weights", "gradients", "optimizer")),
    "activations": ("activations", _gib("activations", "boundary", "logits")),
    "buffers": ("buffers", _gib("buffers")),
    "host": ("host, GiB a node", lambda plan: f"{plan['host_memory_gib']:.0f}"),
    "step": ("step", lambda plan: _time(plan["step_time_s"])),
    "rate": ("tokens/s", lambda plan: f"{plan['tokens_per_s']:,.0f}"),
    "mfu": ("MFU", lambda plan: f"{plan['mfu']:.1%}"),
    "hfu": ("HFU", lambda plan: f"{plan['hfu']:.1%}"),
    "bubble": ("bubble", lambda plan: f"{plan['bubble']:.1%}"),
    "tp_share": ("TP of the step", _share("tp")),
    "dp_share": ("DP of the step", _share("dp")),
    "pp_share": ("PP of the step", _share("pp")),
    "offload_share": ("offload of the step", _share("offload")),
    "tp_s": ("TP", lambda plan: _time(seconds(plan, "tp"))),
    "dp_s": ("DP, exposed", lambda plan: _time(seconds(plan, "dp"))),
    "recompute_s": ("recompute", lambda plan: _time(seconds(plan, "recompute"))),
    "compute_s": ("compute", lambda plan: _time(seconds(plan, "compute"))),
    "layout": ("layout", _layout),
    "microbatches": ("micro-batches", lambda plan: str(trunk(plan)["num_microbatches"])),
    "engine": ("engine", lambda plan: str(plan["engine"]["name"])),
}
"""By the name in a page: heading, and the cell of a plan."""
