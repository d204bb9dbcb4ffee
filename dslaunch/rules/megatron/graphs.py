"""CUDA graphs beside what they do not capture."""

from __future__ import annotations

from dslaunch.rules.megatron.demands import ARGUMENTS, CONFIG, Demand, demands
from dslaunch.rules.megatron.run import Run

_IMPL, _SCOPE, _OLD = "--cuda-graph-impl", "--cuda-graph-scope", ("--enable-cuda-graph", "--external-cuda-graph")
_SCOPES = frozenset({
    "full", "full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba",
})  # fmt: skip


def _graphs(run: Run) -> str:
    """none | local | transformer_engine, as Megatron settles it."""
    if run.on("--enable-cuda-graph"):
        return "local"
    return "transformer_engine" if run.on("--external-cuda-graph") else run.text(_IMPL, "none")


def _captures(run: Run, *scopes: str) -> bool:
    return _graphs(run) != "none" and not set(scopes).isdisjoint(run.texts(_SCOPE))


def _whole_or(run: Run, scope: str) -> bool:
    """Whether whole layers, the whole iteration or this part of layers is captured."""
    return _graphs(run) != "none" and (not run.texts(_SCOPE) or _captures(run, "full", "full_iteration", scope))


def _recomputes(run: Run, module: str) -> bool:
    """Whether selective recomputation has this part of a layer."""
    selective = run.text("--recompute-granularity", "") == "selective" or run.on("--recompute-activations")
    return selective and module in run.texts("--recompute-modules", ("core_attn",))


_GRAPHS = (
    Demand(
        _SCOPE, lambda r: not set(r.texts(_SCOPE)) <= _SCOPES,
        f"{_SCOPE} with a word that it doesn't know; KeyError",
        "Use attn, mlp, moe, moe_router, moe_preprocess, mamba or full_iteration.",
    ),
    Demand(
        _OLD, lambda r: r.on(_OLD[0]) and r.on(_OLD[1]), f"{_OLD[0]} and {_OLD[1]} together",
        f"Write {_IMPL} alone.",
    ),
    Demand(
        _OLD, lambda r: r.on(*_OLD) and r.text(_IMPL, "none") != "none", f"{_IMPL} beside the older flag for it",
        f"Keep {_IMPL}.",
    ),
    Demand(
        (_IMPL, *_OLD),
        lambda r: _graphs(r) == "local" and r.ep > 1 and not r.on("--moe-pad-experts-for-cuda-graph-inference"),
        "CUDA graphs with expert parallelism", "Add --moe-pad-experts-for-cuda-graph-inference.",
    ),
    Demand(
        (_IMPL, *_OLD), lambda r: _graphs(r) != "none" and r.size("--cpu-offloading-num-layers", 0) > 0,
        "CUDA graphs beside --cpu-offloading-num-layers", "Drop one of them.",
    ),
    Demand(
        (_IMPL, *_OLD),
        lambda r: _graphs(r) != "none" and r.text("--recompute-granularity", "none") == "full"
        and r.texts(_SCOPE) != ("full_iteration",),
        "CUDA graphs beside --recompute-granularity full", "Recompute selectively, or capture full_iteration.",
    ),
    Demand(
        (_IMPL, *_OLD),
        lambda r: _recomputes(r, "core_attn") and _whole_or(r, "attn")
        and r.number("--attention-dropout", 0.1) != 0,
        "a graph of attention that is recomputed with dropout", "Add --attention-dropout 0.",
    ),
    Demand(
        (_IMPL, *_OLD),
        lambda r: _recomputes(r, "mlp") and _whole_or(r, "mlp") and r.number("--hidden-dropout", 0.1) != 0,
        "a graph of MLPs that are recomputed with dropout", "Add --hidden-dropout 0.",
    ),
    Demand(
        _SCOPE, lambda r: _graphs(r) == "transformer_engine" and _captures(r, "full_iteration"),
        "full_iteration with Transformer Engine's graphs", f"Use {_IMPL} local.",
    ),
    Demand(
        _SCOPE, lambda r: _captures(r, "moe") and _captures(r, "moe_router"), "both moe and moe_router",
        "Keep one.",
    ),
    Demand(
        _SCOPE, lambda r: _captures(r, "moe", "moe_router") and r.experts <= 1,
        "the graph of a part for experts in a model without", "Take it out.",
    ),
    Demand(
        _SCOPE,
        lambda r: _graphs(r) == "transformer_engine" and _captures(r, "moe_preprocess")
        and not _captures(r, "moe_router"),
        "moe_preprocess without moe_router", "Add moe_router.",
    ),
    Demand(
        _SCOPE, lambda r: _captures(r, "mlp") and r.experts > 1 and r.text("--moe-layer-freq", "1") == "1",
        "mlp where each layer has experts", "Take mlp out.",
    ),
    Demand(
        _SCOPE,
        lambda r: _captures(r, "moe") and r.experts > 1
        and not (r.on("--moe-expert-capacity-factor") and r.on("--moe-pad-expert-input-to-capacity")),
        "moe without --moe-expert-capacity-factor and --moe-pad-expert-input-to-capacity", "Add them, or drop it.",
    ),
)  # fmt: skip

demands(
    "megatron.cuda-graphs", "CUDA graphs beside what they do not capture.",
    tuple(Demand(each.flag, each.refused, each.message, each.fix, "0.16.0", "0.17.0") for each in _GRAPHS),
    evidence=f"{ARGUMENTS}, {CONFIG} at core_v0.16.1, run",
)  # fmt: skip
