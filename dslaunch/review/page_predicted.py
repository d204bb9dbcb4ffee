"""The predicted figures of a plan as rows of its page and report: whether it fits, and how fast it is."""

from __future__ import annotations

from collections.abc import Iterator

from dslaunch.hardware.software import narrow_products
from dslaunch.planfile import EarlierRun, Plan, Prediction

_NO_BAND = "band: none yet"


def precision_words(plan: Plan) -> str:
    """Of weights and activations, and of the products where they are in fewer bits."""
    narrow = narrow_products(plan.engine.name, plan.engine.extra)
    if narrow == "none":
        return plan.training.precision
    products = narrow if narrow in ("mxfp8", "nvfp4") else f"fp8, {narrow}"
    return f"{plan.training.precision} (products in {products})"


def rows(plan: Plan, prediction: Prediction) -> Iterator[tuple[str, str]]:
    """(what, figures with their band), the memory first; what is not known has no row."""
    where = device(plan)
    yield "memory", (
        f"{prediction.peak_memory_gib:.1f} of {prediction.memory_limit_gib:.1f} GiB; the {where} has "
        f"{prediction.gpu_memory_gib:g}; {_memory_band(prediction)}"
    )
    yield f"fullest {where}", f"rank {prediction.worst.rank}: {_sum(prediction)}"
    yield "host memory", (
        f"{prediction.host_memory_gib:.0f} of {prediction.host_limit_gib:.0f} GiB a node"
        + (f", {locked:.0f} of it page-locked" if (locked := prediction.host_pinned_gib) else "")
        + (", with a copy of what checkpoint.async=true writes" if plan.files.checkpoint_async else "")
        + (f"; {loading:.0f} while a script loads" if (loading := prediction.host_loading_gib) else "")
    )
    yield "step", f"{seconds(prediction.step_time_s)}; {_time_band(prediction)}; loading data not counted"
    yield "throughput", f"{prediction.tokens_per_s:,.0f} tokens/s, {prediction.samples_per_s:,.3g} samples/s"
    yield "utilization", f"MFU {prediction.mfu:.1%}, HFU {prediction.hfu:.1%}, bubble {prediction.bubble:.1%}"
    yield "whole run", _whole(plan, prediction)
    if prediction.checkpoint:
        yield "checkpoints", prediction.checkpoint.describe()
    yield from _calibration(prediction)
    if least := plan.supervision.elastic_min_nodes:
        yield "elastic", f"planned anew where hosts are lost, for {least} of {plan.cluster.nodes} nodes at least"


def device(plan: Plan) -> str:
    """What holds a rank's memory."""
    return "process" if plan.cluster.accelerator == "cpu" else "GPU"


def seconds(value: float) -> str:
    """A time in the largest unit that it holds twice."""
    unit, size = _unit(value)
    return f"{value:.3g} s" if size == 1 else f"{value / size:,.1f} {unit}"


def _unit(value: float) -> tuple[str, int]:
    units = (("days", 86400), ("h", 3600), ("min", 60))
    return next((each for each in units if value >= 2 * each[1]), ("s", 1))


def _sum(prediction: Prediction) -> str:
    """Such as `llm 46.9 + overhead 2.1`, the largest first."""
    parts: dict[str, float] = {}
    for term, gib in prediction.worst.memory_gib.items():
        owner = term.split("/")[0]
        parts[owner] = parts.get(owner, 0.0) + gib
    largest = sorted(parts.items(), key=lambda part: (-part[1], part[0]))
    return " + ".join(f"{owner} {gib:.1f}" for owner, gib in largest)


def _memory_band(prediction: Prediction) -> str:
    band, gib = prediction.memory_band, prediction.peak_memory_gib
    if band is None:
        return _NO_BAND
    return f"band {gib * band.low:.1f} to {gib * band.high:.1f} ({band.describe()})"


def _time_band(prediction: Prediction) -> str:
    band, value = prediction.time_band, prediction.step_time_s
    if band is None:
        return _NO_BAND
    unit, size = _unit(value)
    return f"band {value * band.low / size:.3g} to {value * band.high / size:.3g} {unit} ({band.describe()})"


def _whole(plan: Plan, prediction: Prediction) -> str:
    steps, usd = plan.training.steps, prediction.usd_per_step
    hours = prediction.step_time_s * steps * plan.world_size / 3600
    counted = f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
    used = f", {counted} GPU hours" if device(plan) == "GPU" else ""
    price = "" if usd is None else f", ${usd * steps:,.0f}"
    return f"{steps:,} steps in {seconds(prediction.step_time_s * steps)}{used}{price}"


def _calibration(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """What the site's own runs corrected, and what runs of this very plan measured."""
    found = prediction.calibration
    if found is None:
        return
    yield "corrected", (
        f"by efficiency.yaml for {found.key}: time x{found.time:.3g}, memory x{found.memory:.3g} "
        f"(runs: {found.runs}, of different plans: {found.plans})"
    )
    for run in found.measured:
        yield f"measured in {run.run}", (
            f"step {seconds(run.step_time_s)}, predicted {seconds(prediction.step_time_s)}"
            f"{_allocated(run, prediction)}"
        )


def _allocated(run: EarlierRun, prediction: Prediction) -> str:
    if run.allocated_gib is None:
        return ""
    return f"; allocated {run.allocated_gib:.1f} GiB, predicted {prediction.allocated_gib:.1f}"
