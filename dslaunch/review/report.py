"""The report: one page that shows a plan, and a run beside it."""

from __future__ import annotations

import graphlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from dslaunch.planfile import Candidate, ComponentPlan, Finding, Plan, Prediction
from dslaunch.review import page_predicted, plots
from dslaunch.review.changes import layout_words
from dslaunch.review.figures_text import amount
from dslaunch.review.html import html_page
from dslaunch.review.measured import CURVES, Measured, comparison, event_rows
from dslaunch.review.rank_map import domain_words, groups, rows
from dslaunch.review.side import Side
from dslaunch.review.timeline import ONCE, Span, merged, spans
from dslaunch.rules.output import page

TERMS = ("weights", "gradients", "optimizer", "activations", "boundary", "logits", "buffers", "overhead")
_PIXELS = 760
_FIRST = 8
"""Micro-batches that the start of a pipeline is drawn for, at most."""
_PREDICTED = {"step_time_s": "step_time_s", "tokens_per_s": "tokens_per_s"}
"""Fields of metrics.jsonl that a prediction has a figure for, under its own name."""


@dataclass(frozen=True)
class Drawing:
    """A plot, what it says in one sentence, and the figures behind it."""

    svg: Markup
    caption: str
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def report_html(side: Side, run: Measured | None) -> str:
    """The page of a plan; of a run too, where there is one."""
    plan, prediction = replace(side.plan, components=_in_flow(side.plan)), side.prediction
    return html_page(
        "report.html.j2",
        title=f"{plan.name} on {plan.world_size} x {plan.cluster.gpu}",
        plan=plan,
        facts=list(_facts(plan, prediction)),
        layouts=[(name, layout_words(c)) for name, c in plan.components.items()],
        equation=list(_equation(plan)),
        memory=_memory(plan, prediction) if prediction else None,
        timelines=list(_timelines(plan, prediction)) if prediction else [],
        nvlink=domain_words(plan),
        maps=[(name, rows(plan, c), groups(plan, c)) for name, c in plan.components.items()],
        candidates=_candidates(prediction) if prediction else None,
        findings=[(finding, _page_of(finding)) for finding in side.findings],
        files=sorted(side.files.items()),
        run=run,
        compared=[(name, _figure(a), _figure(b), _share(a, b)) for name, a, b in comparison(run, prediction)]
        if run
        else [],
        curves=list(_curves(run, prediction)) if run else [],
        events=event_rows(run.events) if run else [],
    )


def _in_flow(plan: Plan) -> dict[str, ComponentPlan]:
    """The components in the order in which the model computes: what feeds another comes before it."""
    feeding = graphlib.TopologicalSorter[str](dict.fromkeys(plan.components, ()))
    for edge in plan.model["edges"]:
        if {edge["from"], edge["to"]} <= plan.components.keys():
            feeding.add(edge["to"], edge["from"])
    return {name: plan.components[name] for name in feeding.static_order()}


def _facts(plan: Plan, found: Prediction | None) -> Iterator[tuple[str, str]]:
    yield "recipe", plan.recipe
    yield "engine", f"{plan.engine.name} {plan.engine.version}"
    yield "cluster", f"{plan.cluster.shape} {plan.cluster.gpu}"
    yield "precision", page_predicted.precision_words(plan)
    if found is not None:
        yield from page_predicted.rows(plan, found)


def _equation(plan: Plan) -> Iterator[str]:
    """The batch of each component, and what a step reads."""
    for name, c in plan.components.items():
        yield (
            f"{name}: {c.micro_batch} a pass x {c.num_microbatches} passes x {c.dp} replicas = "
            f"{c.micro_batch * c.num_microbatches * c.dp} samples"
        )
    tokens = plan.global_batch * plan.training.seq_len
    yield (
        f"a step: {plan.global_batch} samples x {plan.training.seq_len} tokens = {tokens:,} tokens; the run: x "
        f"{plan.training.steps:,} steps = {tokens * plan.training.steps:,}"
    )


def _memory(plan: Plan, found: Prediction) -> Drawing:
    stacks = {f"rank {found.worst.rank}, the fullest": _worst_terms(found)}
    for name in plan.components:
        stages = found.components[name]
        for stage in stages:
            label = name if len(stages) == 1 else f"{name} stage {stage.stage}"
            stacks[label] = {t: gib for t, gib in vars(stage.memory_gib).items() if t in TERMS}
    drawn = [
        {"row": row, "term": term, "gib": gib, "said": f"{row}: {term} {gib:.2f} GiB"}
        for row, terms in stacks.items()
        for term, gib in terms.items()
        if gib > 0
    ]
    limits = {"limit of the plan": found.memory_limit_gib, "memory of the GPU": found.gpu_memory_gib}
    table = tuple(
        (row, *(amount(terms.get(term, 0.0), "GiB") for term in TERMS), amount(sum(terms.values()), "GiB"))
        for row, terms in stacks.items()
    )
    caption = (
        f"The fullest GPU holds {found.peak_memory_gib:.1f} GiB of {found.memory_limit_gib:.1f} that the plan may "
        f"take; it has {found.gpu_memory_gib:g}. The dashed lines are these two."
    )
    svg = Markup(plots.bars(drawn, TERMS, limits))
    return Drawing(svg, caption, ("on one GPU, GiB", *TERMS, "total"), table)


def _worst_terms(found: Prediction) -> dict[str, float]:
    """The fullest rank's GiB by term, its components added up."""
    terms: dict[str, float] = {}
    for key, gib in found.worst.memory_gib.items():
        term = key.rpartition("/")[2].split(" ")[0]
        term = term if term in TERMS else "overhead"
        terms[term] = terms.get(term, 0.0) + gib
    return terms


def _timelines(plan: Plan, found: Prediction) -> Iterator[Drawing]:
    """The whole step of all components, then the first passes of the one with most stages."""
    lines = {
        name: spans(c, [stage.time_s for stage in found.components[name]], plan.training.schedule)
        for name, c in plan.components.items()
    }
    placed = _in_turn(plan, lines)
    end = max(span.end for line in placed.values() for span in line)
    drawn = [
        _span_row(_label(plan, name, span), span)
        for name, line in placed.items()
        for span in merged(line, end / _PIXELS)
    ]
    svg = Markup(plots.timeline(drawn, ("work", *ONCE), "step"))
    yield Drawing(
        svg,
        f"One step, to scale: {end:.3g} s. A gap is a stage that waits: {found.bubble:.1%} of the trunk's part "
        "of the step; waits of less than a pixel are not seen. Components on the same ranks stand one after "
        "another, each with its forward and backward; dp is what no computation hides of the exchange of "
        "gradients.",
    )
    name, c = max(plan.components.items(), key=lambda item: item[1].pp)
    if c.pp > 1:
        yield _start(name, c, plan, lines[name])


def _start(name: str, c: ComponentPlan, plan: Plan, line: list[Span]) -> Drawing:
    passes = [span for span in line if span.what not in ONCE]
    split = any(span.what == "weights" for span in passes)
    kinds = ("forward", "backward", "weights") if split else ("forward", "backward")
    until = _filled(c, [span for span in passes if span.stage == 0])
    drawn = [_span_row(_label(plan, name, span), span) for span in passes if span.start < until]
    return Drawing(
        Markup(plots.timeline(drawn, kinds, "start")),
        f"{name}: how the pipeline fills, schedule {plan.training.schedule}. The ledger has forward and backward "
        "as one sum; here it is cut 1 to 2, recompute added to the backward"
        f"{', and weights are their gradients, cut from it' if split else ''}.",
    )


def _filled(c: ComponentPlan, first: list[Span]) -> float:
    """Seconds until the first stage has done its first micro-batches; with model chunks, its first backward, which
    is hundreds of passes later."""
    if c.vpp > 1:
        return next(span.end for span in first if span.what == "backward")
    return max(span.end for span in first if span.micro_batch <= min(c.pp, _FIRST))


def _in_turn(plan: Plan, lines: dict[str, list[Span]]) -> dict[str, list[Span]]:
    """Components on the same ranks one after another, as the time ledger counts them."""
    free = [0.0] * plan.world_size
    placed = {}
    for name, line in lines.items():
        c = plan.components[name]
        held = range(c.rank_offset, c.rank_offset + c.ranks)
        start = max(free[rank] for rank in held)
        placed[name] = [span.moved(start) for span in line]
        end = max(span.end for span in placed[name])
        for rank in held:
            free[rank] = end
    return placed


def _label(plan: Plan, name: str, span: Span) -> str:
    return name if plan.components[name].pp == 1 else f"{name} stage {span.stage}"


def _span_row(label: str, span: Span) -> dict[str, Any]:
    batch = "" if span.micro_batch < 0 else f" of micro-batch {span.micro_batch}, chunk {span.chunk}"
    said = f"{label}: {span.what}{batch}, {span.start:.4g} to {span.end:.4g} s"
    return {"row": label, "kind": span.what, "start": span.start, "end": span.end, "said": said}


def _candidates(found: Prediction) -> Drawing | None:
    front = found.search.front if found.search else ()
    every = {(c.layout, c.peak_memory_gib): c for c in (*found.candidates, *front)}
    if len(every) < 2:
        return None
    drawn = [
        {
            "gib": c.peak_memory_gib,
            "seconds": c.step_time_s,
            "kind": _kind(c),
            "said": f"{c.layout}: {c.peak_memory_gib:.1f} GiB, {c.step_time_s:.3g} s: {c.verdict}",
        }
        for c in sorted(every.values(), key=_kind, reverse=True)  # the chosen one is drawn last, on top
        if c.step_time_s > 0
    ]
    table = tuple(
        (c.layout, amount(c.peak_memory_gib, "GiB"), amount(c.step_time_s or None, "s"), c.verdict)
        for c in every.values()
    )
    considered = f" of {found.search.considered:,} layouts covered" if found.search else ""
    return Drawing(
        Markup(plots.scatter(drawn, ("chosen", "lost", "refused"), found.memory_limit_gib)),
        f"{len(every)} candidates{considered}, by memory and step time. The dashed line is the limit of a GPU.",
        ("layout", "GiB", "step, s", "verdict"),
        table,
    )


def _kind(candidate: Candidate) -> str:
    first = candidate.verdict.partition(":")[0].split(" ")[0]
    return first if first in ("chosen", "refused") else "lost"


def _page_of(finding: Finding) -> str:
    return page(finding.rule)


def _curves(run: Measured, found: Prediction | None) -> Iterator[Drawing]:
    if not run.steps:
        return
    for field, title in CURVES.items():
        predicted = getattr(found, _PREDICTED[field]) if found and field in _PREDICTED else None
        beside = f"; predicted {predicted:.4g}, the dashed line" if predicted is not None else ""
        last = run.steps[-1][field]
        yield Drawing(
            Markup(plots.curve(run.steps, field, title, predicted)),
            f"{title}: {_figure(last)} in step {run.steps[-1]['step']}{beside}.",
        )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"


def _share(predicted: float | None, measured: float | None) -> str:
    if not predicted or measured is None:
        return ""
    return f"{measured / predicted:.2f} x predicted"
