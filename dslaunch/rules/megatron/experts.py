"""Megatron's checks of experts: their number, router, dispatcher and capacity."""

from __future__ import annotations

from dslaunch.rules.megatron.demands import CONFIG, RUN, Demand, demands
from dslaunch.rules.megatron.run import Run

_BALANCED = {"aux_loss", "seq_aux_loss", "none"}
_BALANCED_GLOBALLY = {*_BALANCED, "global_aux_loss"}


def _dispatcher(run: Run) -> str:
    return run.text("--moe-token-dispatcher-type", "allgather")


def _balancing(run: Run) -> tuple[str, ...]:
    return run.texts("--moe-router-load-balancing-type", ("aux_loss",))


def _capacity(run: Run) -> bool:
    """Whether experts have a capacity: a negative factor means none."""
    return run.on("--moe-expert-capacity-factor") and run.number("--moe-expert-capacity-factor") >= 0


def _groups(run: Run) -> int:
    return run.size("--moe-router-num-groups", 0)


_PADDING = "--moe-router-padding-for-quantization"
_EXPERTS = (
    Demand(
        "--expert-model-parallel-size", lambda r: r.ep > 1 and r.experts == 0,
        "expert parallelism without --num-experts", "Give --num-experts, or use --expert-model-parallel-size 1.",
    ),
    Demand(
        "--num-experts", lambda r: r.ep > 1 and r.experts > 0 and bool(r.experts % r.ep),
        "--num-experts is no multiple of --expert-model-parallel-size", "Use a size that divides the experts.",
    ),
    Demand(
        "--expert-model-parallel-size", lambda r: r.ep > 1 and r.on("--fp16"),
        "expert parallelism with --fp16", "Use --bf16.", before="0.16.0",
    ),
    Demand(
        "--moe-grouped-gemm", lambda r: r.on("--moe-grouped-gemm") and not r.on("--bf16"),
        "--moe-grouped-gemm without --bf16", "Train in --bf16.", before="0.16.0",
    ),
    Demand(
        "--spec", lambda r: r.on("--spec") and r.experts > 0,
        "--spec with experts", "Drop --spec.", before="0.16.0",
    ),
    Demand(
        "--disable-bias-linear", lambda r: r.experts > 0 and not r.on("--disable-bias-linear"),
        "experts with biases", "Add --disable-bias-linear.", before="0.15.0",
    ),
    Demand(
        "--sequence-parallel", lambda r: r.ep > 1 and r.tp > 1 and not r.on("--sequence-parallel"),
        "expert and tensor parallelism without --sequence-parallel", "Add --sequence-parallel.", before="0.15.0",
    ),
    Demand(
        "--disable-bias-linear", lambda r: r.experts > 0 and not r.on("--disable-bias-linear") and r.expert_tp > 1,
        "experts with biases at an expert-tensor-parallel-size above 1 (which follows the tensor-parallel size)",
        "Add --disable-bias-linear, or --expert-tensor-parallel-size 1.", since="0.15.0",
    ),
    Demand(
        "--moe-ffn-hidden-size", lambda r: r.on("--moe-ffn-hidden-size") and r.experts == 0,
        "--moe-ffn-hidden-size without --num-experts", "Drop it, or give --num-experts.", since="0.13.0",
    ),
    Demand(
        "--moe-enable-deepep", lambda r: r.on("--moe-enable-deepep") and _dispatcher(r) != "flex",
        "--moe-enable-deepep without the token dispatcher flex", "Add --moe-token-dispatcher-type flex.",
    ),
    Demand(
        "--moe-pad-expert-input-to-capacity",
        lambda r: r.on("--moe-pad-expert-input-to-capacity") and _dispatcher(r) == "flex",
        "--moe-pad-expert-input-to-capacity with the token dispatcher flex",
        "Drop it, or use the token dispatcher alltoall.", before="0.16.0",
    ),
    Demand(
        "--moe-pad-expert-input-to-capacity",
        lambda r: r.on("--moe-pad-expert-input-to-capacity") and _dispatcher(r) == "flex"
        and (r.on("--moe-enable-deepep") or r.text("--moe-flex-dispatcher-backend", "deepep") == "deepep"),
        "--moe-pad-expert-input-to-capacity with the token dispatcher flex over DeepEP",
        "Drop it, or use the token dispatcher alltoall.", since="0.16.0",
    ),
    Demand(
        "--moe-shared-expert-overlap",
        lambda r: r.on("--moe-shared-expert-overlap") and r.on("--moe-shared-expert-intermediate-size")
        and _dispatcher(r) != "alltoall",
        "--moe-shared-expert-overlap without the token dispatcher alltoall",
        "Add --moe-token-dispatcher-type alltoall.", before="0.18.0",
    ),
    Demand(
        "--moe-shared-expert-overlap",
        lambda r: r.on("--moe-shared-expert-overlap") and r.on("--moe-shared-expert-intermediate-size")
        and _dispatcher(r) == "allgather",
        "--moe-shared-expert-overlap with the token dispatcher allgather, the default",
        "Add --moe-token-dispatcher-type alltoall.", since="0.18.0",
    ),
    Demand(
        "--moe-expert-capacity-factor",
        lambda r: r.on("--moe-expert-capacity-factor") and not set(_balancing(r)) <= _BALANCED,
        "--moe-expert-capacity-factor with a load balancing other than aux_loss, seq_aux_loss or none",
        "Use aux_loss, or no capacity.", before="0.15.0",
    ),
    Demand(
        "--moe-expert-capacity-factor",
        lambda r: r.on("--moe-expert-capacity-factor") and not set(_balancing(r)) <= _BALANCED_GLOBALLY,
        "--moe-expert-capacity-factor with a load balancing other than the auxiliary losses or none",
        "Use aux_loss, or no capacity.", since="0.15.0",
    ),
    Demand(
        "--moe-pad-expert-input-to-capacity",
        lambda r: r.on("--moe-pad-expert-input-to-capacity") and not _capacity(r),
        "--moe-pad-expert-input-to-capacity without --moe-expert-capacity-factor", "Give the factor.",
    ),
    Demand(
        "--moe-router-topk",
        lambda r: r.size("--moe-router-topk", 2) == 1
        and r.text("--moe-router-score-function", "softmax") == "softmax"
        and not r.on("--moe-router-pre-softmax") and _balancing(r) != ("sinkhorn",),
        "--moe-router-topk 1 without --moe-router-pre-softmax: the softmax over one expert has no gradient",
        "Add --moe-router-pre-softmax.",
    ),
    Demand(
        "--moe-router-group-topk", lambda r: r.size("--moe-router-group-topk", 0) > 0 and not _groups(r),
        "--moe-router-group-topk without --moe-router-num-groups", "Give the number of groups.",
    ),
    Demand(
        "--moe-router-num-groups",
        lambda r: r.size("--moe-router-group-topk", 0) > 0 and _groups(r) > 0
        and (r.experts == 0 or r.experts % _groups(r) > 0 or r.size("--moe-router-group-topk") > _groups(r)),
        "--moe-router-num-groups must divide --num-experts and be at least --moe-router-group-topk",
        "Choose another number of groups.",
    ),
    Demand(
        "--moe-router-enable-expert-bias",
        lambda r: r.on("--moe-router-enable-expert-bias")
        and r.text("--moe-router-score-function", "softmax") == "softmax",
        "--moe-router-enable-expert-bias with the score function softmax",
        "Add --moe-router-score-function sigmoid.",
    ),
    Demand(
        "--moe-aux-loss-coeff",
        lambda r: len(_balancing(r)) > 1 and len(r.texts("--moe-aux-loss-coeff", ("0",))) != len(_balancing(r)),
        "several --moe-router-load-balancing-type need as many --moe-aux-loss-coeff", "Give one for each.",
    ),
    Demand(
        "--moe-use-upcycling", lambda r: r.on("--moe-use-upcycling") and not r.on("--save"),
        "--moe-use-upcycling without --save", "Name the folder that the upcycled checkpoint goes to.",
    ),
    Demand(
        "--moe-latent-size", lambda r: r.on("--moe-latent-size") and r.experts == 0,
        "--moe-latent-size without --num-experts", "Drop it, or give --num-experts.",
    ),
    Demand(
        "--moe-router-topk", lambda r: 0 < r.experts < r.size("--moe-router-topk", 2),
        "--moe-router-topk is above --num-experts: torch.topk raises in the first forward pass", "Choose fewer.",
    ),
    Demand(
        _PADDING, lambda r: r.on(_PADDING) and not r.on("--fp8-format", "--fp4-format"),
        f"{_PADDING} without --fp8-format or --fp4-format", "Drop it.", since="0.16.0", before="0.17.0",
    ),
    Demand(
        _PADDING,
        lambda r: r.on(_PADDING) and r.text("--moe-token-dispatcher-type", "allgather") == "allgather",
        f"{_PADDING} with the token dispatcher allgather", "Use --moe-token-dispatcher-type alltoall.",
        since="0.16.0", before="0.17.0",
    ),
)  # fmt: skip
demands(
    "megatron.experts", "Experts, their router, or their dispatcher set as Megatron does not take them.", _EXPERTS,
    evidence=f"NVIDIA/Megatron-LM:megatron/training/arguments.py validate_args, {CONFIG} at {RUN}",
)  # fmt: skip
