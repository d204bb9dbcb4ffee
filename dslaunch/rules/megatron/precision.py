"""Megatron's checks of number formats, recompute and optimizers."""

from __future__ import annotations

from dslaunch.rules.megatron.demands import Demand, demands
from dslaunch.rules.megatron.run import Run

_SHARDED = ("--use-distributed-optimizer", "--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp")
_OVERLAPPED = ("--overlap-grad-reduce", "--overlap-param-gather")
_FULL = "--recompute-granularity full"
_OLD_MODULES = frozenset({"core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe"})
_MODULES = _OLD_MODULES | {"shared_experts"}


def _recompute(run: Run) -> str:
    return "selective" if run.on("--recompute-activations") else run.text("--recompute-granularity")


def _modules(run: Run) -> tuple[str, ...]:
    return run.texts("--recompute-modules") if _recompute(run) == "selective" else ()


def _half(run: Run) -> bool:
    return run.on("--fp16") or run.on("--bf16")


def _fp8(run: Run) -> bool:
    return run.on("--fp8-format")


def _above_stage(flag: str) -> Demand:
    return Demand(
        flag,
        lambda r: r.on("--first-last-layers-bf16") and r.size(flag, 1) > r.size("--num-layers") // r.pp,
        f"{flag} is more than a stage has layers", "Write fewer.", since="0.16.0", before="0.17.0",
    )  # fmt: skip


_PRECISION = (
    Demand(
        "--fp16", lambda r: r.on("--fp16") and r.on("--bf16"),
        "--fp16 and --bf16 exclude each other", "Keep one; bf16 needs no loss scale.",
    ),
    Demand(
        "--fp8-param-gather", lambda r: r.on("--fp8-param-gather") and not r.on(*_SHARDED),
        "--fp8-param-gather without a sharded optimizer", "Add --use-distributed-optimizer, or drop it.",
    ),
    Demand(
        "--fp8-param-gather", lambda r: r.on("--fp8-param-gather") and not _fp8(r),
        "--fp8-param-gather without --fp8-format", "Add --fp8-format hybrid, or drop it.",
    ),
    Demand(
        "--fp4-format", lambda r: r.on("--fp4-format") and _fp8(r),
        "--fp4-format and --fp8-format exclude each other", "Keep one.",
    ),
    Demand(
        "--fp4-param-gather", lambda r: r.on("--fp4-param-gather") and not r.on("--fp4-format"),
        "--fp4-param-gather without --fp4-format", "Add --fp4-format e2m1, or drop it.",
    ),
    Demand(
        "--fp16-lm-cross-entropy", lambda r: r.on("--fp16-lm-cross-entropy") and not r.on("--fp16"),
        "--fp16-lm-cross-entropy without --fp16", "Drop it.",
    ),
    Demand(
        "--fp32-residual-connection", lambda r: r.on("--fp32-residual-connection") and not _half(r),
        "--fp32-residual-connection without --fp16 or --bf16", "Drop it, or train in --bf16.",
    ),
    Demand(
        "--first-last-layers-bf16",
        lambda r: r.on("--first-last-layers-bf16") and _fp8(r) and r.text("--fp8-recipe", "delayed") == "delayed",
        "--first-last-layers-bf16 with the fp8 recipe delayed", "Use --fp8-recipe tensorwise, mxfp8 or blockwise.",
    ),
    Demand(
        "--moe-router-padding-for-fp8", lambda r: r.on("--moe-router-padding-for-fp8") and not _fp8(r),
        "--moe-router-padding-for-fp8 without --fp8-format", "Drop it, or train in fp8.", before="0.15.0",
    ),
    Demand(
        "--moe-router-padding-for-fp8",
        lambda r: r.on("--moe-router-padding-for-fp8") and not _fp8(r) and not r.on("--fp4-format"),
        "--moe-router-padding-for-fp8 without --fp8-format or --fp4-format", "Drop it.", since="0.15.0",
    ),
    Demand(
        "--moe-router-padding-for-fp8",
        lambda r: r.on("--moe-router-padding-for-fp8")
        and r.text("--moe-token-dispatcher-type", "allgather") == "allgather",
        "--moe-router-padding-for-fp8 with the token dispatcher allgather",
        "Use --moe-token-dispatcher-type alltoall.",
    ),
    Demand(
        "--main-grads-dtype",
        lambda r: r.on("--accumulate-allreduce-grads-in-fp32") and r.on("--bf16")
        and r.text("--main-grads-dtype", "fp32") != "fp32",
        "--accumulate-allreduce-grads-in-fp32 with a --main-grads-dtype that isn't fp32",
        "Drop one of the two.",
    ),
    *(_above_stage(flag) for flag in ("--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16")),
)  # fmt: skip
demands("megatron.precision", "Number formats that exclude each other, or lack what they need.", _PRECISION)

_RECOMPUTE = (
    Demand(
        "--recompute-granularity", lambda r: _recompute(r) == "full" and not r.on("--recompute-method"),
        f"{_FULL} without --recompute-method", "Add --recompute-method uniform --recompute-num-layers 1.",
    ),
    Demand(
        "--recompute-granularity", lambda r: _recompute(r) == "full" and not r.on("--recompute-num-layers"),
        f"{_FULL} without --recompute-num-layers", "Add --recompute-num-layers 1.",
    ),
    Demand(
        "--recompute-method", lambda r: _recompute(r) == "selective" and r.on("--recompute-method"),
        "--recompute-method with selective recompute", "Drop it, or use --recompute-granularity full.",
    ),
    Demand(
        "--recompute-num-layers", lambda r: _recompute(r) == "selective" and r.on("--recompute-num-layers"),
        "--recompute-num-layers with selective recompute", "Drop it, or use --recompute-granularity full.",
    ),
    Demand(
        "--distribute-saved-activations", lambda r: r.on("--distribute-saved-activations") and r.tp == 1,
        "--distribute-saved-activations at tensor-model-parallel-size 1", "Drop it.",
    ),
    Demand(
        "--distribute-saved-activations",
        lambda r: r.on("--distribute-saved-activations") and _recompute(r) != "full",
        f"--distribute-saved-activations without {_FULL}", f"Add {_FULL}, or drop it.",
    ),
    Demand(
        "--distribute-saved-activations",
        lambda r: r.on("--distribute-saved-activations") and r.on("--sequence-parallel") and r.tp > 1,
        "--distribute-saved-activations with --sequence-parallel, which shares them out already", "Drop it.",
    ),
    Demand(
        "--recompute-modules", lambda r: bool(set(_modules(r)) - _OLD_MODULES),
        f"--recompute-modules takes {', '.join(sorted(_OLD_MODULES))}", "Choose among these.", before="0.14.0",
    ),
    Demand(
        "--recompute-modules", lambda r: bool(set(_modules(r)) - _MODULES),
        f"--recompute-modules takes {', '.join(sorted(_MODULES))}", "Choose among these.",
        since="0.14.0", before="0.19.0",
    ),
    Demand(
        "--recompute-modules", lambda r: "moe_act" in _modules(r) and not r.on("--moe-grouped-gemm"),
        "--recompute-modules moe_act without --moe-grouped-gemm", "Add --moe-grouped-gemm.",
    ),
    Demand(
        "--recompute-modules", lambda r: "mla_up_proj" in _modules(r) and not r.on("--multi-latent-attention"),
        "--recompute-modules mla_up_proj without --multi-latent-attention", "Take mla_up_proj out.",
    ),
    Demand(
        "--recompute-modules",
        lambda r: "shared_experts" in _modules(r) and r.on("--moe-shared-expert-intermediate-size")
        and r.on("--moe-shared-expert-overlap"),
        "--recompute-modules shared_experts with --moe-shared-expert-overlap", "Drop one of the two.",
        since="0.14.0",
    ),
    Demand(
        "--recompute-modules",
        lambda r: _fp8(r) and r.text("--fp8-recipe", "delayed") == "delayed"
        and bool({"moe_act", "layernorm"} & set(_modules(r))),
        "--recompute-modules moe_act or layernorm with the fp8 recipe delayed", "Use another --fp8-recipe.",
        since="0.14.0",
    ),
    Demand(
        "--moe-layer-recompute", lambda r: r.on("--moe-layer-recompute") and _recompute(r) == "full",
        f"--moe-layer-recompute with {_FULL}", "Drop --moe-layer-recompute.",
    ),
    Demand(
        "--cpu-offloading-num-layers",
        lambda r: r.size("--cpu-offloading-num-layers", 0) > 0 and bool(_recompute(r)),
        "--cpu-offloading-num-layers with recompute", "Keep one of the two.",
    ),
    Demand(
        "--cpu-offloading-num-layers", lambda r: r.size("--cpu-offloading-num-layers", 0) > 0 and r.pp > 1,
        "--cpu-offloading-num-layers in a pipeline", "Use --pipeline-model-parallel-size 1, or no offload.",
    ),
    Demand(
        "--cpu-offloading-num-layers",
        lambda r: r.size("--cpu-offloading-num-layers", 0) >= r.size("--num-layers"),
        "--cpu-offloading-num-layers isn't below --num-layers", "Offload fewer layers.",
        since="0.16.0", before="0.17.0",
    ),
)  # fmt: skip
demands(
    "megatron.recompute", "Recompute and offload of activations that Megatron does not combine.", _RECOMPUTE
)

_OPTIMIZER = (
    Demand(
        "--optimizer-cpu-offload",
        lambda r: r.on("--optimizer-cpu-offload") and not r.on("--use-precision-aware-optimizer"),
        "--optimizer-cpu-offload without --use-precision-aware-optimizer", "Add --use-precision-aware-optimizer.",
    ),
    Demand(
        "--weight-decay-incr-style",
        lambda r: r.text("--weight-decay-incr-style", "constant") != "constant"
        and not (r.on("--start-weight-decay") and r.on("--end-weight-decay")),
        "a --weight-decay-incr-style that isn't constant needs --start-weight-decay and --end-weight-decay",
        "Give both, or use constant.",
    ),
    Demand(
        "--start-weight-decay",
        lambda r: r.text("--weight-decay-incr-style", "constant") == "constant"
        and r.on("--start-weight-decay", "--end-weight-decay"),
        "--start-weight-decay or --end-weight-decay with a constant weight decay",
        "Use --weight-decay, or --weight-decay-incr-style linear.",
    ),
    Demand(
        "--min-lr", lambda r: r.on("--lr") and r.number("--min-lr", 0.0) > r.number("--lr"),
        "--min-lr is larger than --lr", "Lower --min-lr.",
    ),
    Demand(
        "--optimizer",
        lambda r: "muon" in r.text("--optimizer", "adam") and r.on("--use-distributed-optimizer"),
        "the muon optimizers with --use-distributed-optimizer", "Drop --use-distributed-optimizer.",
        since="0.16.0", before="0.18.0",
    ),
    Demand(
        "--optimizer",
        lambda r: "muon" in r.text("--optimizer", "adam") and r.on(*_OVERLAPPED),
        "the muon optimizers with overlapped collectives", "Drop the two overlaps of gradients and parameters.",
        since="0.16.0", before="0.17.0",
    ),
    Demand(
        "--optimizer",
        lambda r: r.text("--optimizer", "adam") == "muon" and r.on(*_OVERLAPPED),
        "--optimizer muon with overlapped collectives", "Use dist_muon, or drop --overlap-grad-reduce.",
        since="0.17.0", before="0.18.0",
    ),
    Demand(
        "--optimizer",
        lambda r: "muon" in r.text("--optimizer", "adam") and r.on("--use-torch-fsdp2", "--use-megatron-fsdp"),
        "the muon optimizers with FSDP", "Use adam or sgd with FSDP.", since="0.16.0", before="0.18.0",
    ),
    Demand(
        "--ckpt-format",
        lambda r: r.text("--optimizer", "adam") not in ("adam", "sgd")
        and r.text("--ckpt-format", "torch_dist") not in ("torch", "torch_dist"),
        "this --optimizer with a --ckpt-format other than torch or torch_dist", "Use torch_dist.", since="0.18.0",
    ),
    Demand(
        "--optimizer",
        lambda r: r.text("--optimizer", "adam") not in ("adam", "sgd")
        and r.on("--use-torch-fsdp2", "--use-megatron-fsdp"),
        "this --optimizer with FSDP", "Use adam or sgd with FSDP.", since="0.18.0",
    ),
)  # fmt: skip
demands("megatron.optimizer", "Optimizer settings that Megatron does not take together.", _OPTIMIZER)
