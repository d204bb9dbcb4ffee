"""The redistribution of a plan in words and as a drawing: which rank sends which samples to whom."""

from __future__ import annotations

from collections.abc import Iterable

from dslaunch.runtime.messages import PIPELINE, Message, Step


def table(step: Step, edge: int, forward: bool) -> str:
    """The messages over one edge as a Markdown table, a row for each pair of ranks, in order of the receivers.

    Samples that stay on a rank are shown too: nothing is sent for them.
    """
    rows: dict[tuple[int, int], list[int]] = {}
    for message in _over(step, edge, forward):
        rows.setdefault((message.destination, message.source), []).extend(message.samples)
    lines = ["| to rank | from rank | samples |", "|---|---|---|"]
    for (destination, source), samples in sorted(rows.items()):
        shown = "itself" if source == destination else str(source)
        lines.append(f"| {destination} | {shown} | {_intervals(samples)} |")
    return "\n".join(lines)


def mermaid(step: Step) -> str:
    """The forward messages of a step as a Mermaid flow chart: a box for each rank of each component's stage."""
    lines = ["flowchart LR"]
    arrows: dict[tuple[str, str], list[int]] = {}
    for message in step.messages:
        if message.sender.forward:
            ends = (
                _box(message.sender.component, message.sender.stage, message.source),
                _box(message.receiver.component, message.receiver.stage, message.destination),
            )
            arrows.setdefault(ends, []).extend(message.samples)
    for name, part in step.parts.items():
        for stage in range(part.grid.stages):
            title = name if part.grid.pp == 1 else f"{name}, stage {stage}"
            lines.append(f'  subgraph {name}{stage}["{title}"]')
            lines += [
                f'    {_box(name, stage, rank)}["rank {rank}"]' for rank in part.grid.stage_ranks(stage)
            ]
            lines.append("  end")
    lines += [f'  {a} -->|"{_intervals(samples)}"| {b}' for (a, b), samples in sorted(arrows.items())]
    return "\n".join(lines)


def describe(step: Step) -> str:
    """Which samples each rank takes from which over every edge, forward and backward, in Markdown."""
    parts = []
    for number, edge in enumerate(step.edges):
        parts.append(f"{edge['from']} -> {edge['to']}\n\n{table(step, number, forward=True)}")
        if step.parts[edge["from"]].backward:
            title = f"gradients {edge['to']} -> {edge['from']}"
            parts.append(f"{title}\n\n{table(step, number, forward=False)}")
    return "\n\n".join(parts)


def _over(step: Step, edge: int, forward: bool) -> Iterable[Message]:
    assert edge != PIPELINE
    return (each for each in step.messages if each.edge == edge and each.sender.forward == forward)


def _box(component: str, stage: int, rank: int) -> str:
    return f"{component}{stage}_{rank}"


def _intervals(samples: Iterable[int]) -> str:
    """Such as `0-3, 8`."""
    runs: list[list[int]] = []
    for sample in sorted(samples):
        if runs and sample == runs[-1][-1] + 1:
            runs[-1].append(sample)
        else:
            runs.append([sample])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
