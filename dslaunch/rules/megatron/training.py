"""Megatron's checks of attention, the course of training, data, and determinism."""

from __future__ import annotations

from dslaunch.rules.megatron.demands import ARGUMENTS, CONFIG, Demand, demands
from dslaunch.rules.megatron.run import Run

_MLA = "--multi-latent-attention"
_READ = ("0.16.0", "0.17.0")
"""Since and before which version a check is known that was tried with core 0.16.1 alone."""
_HYBRID, _VARIANT = "--hybrid-context-parallel", "--experimental-attention-variant"
_TE_ACTIVATION = "--use-te-activation-func"
_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")


def _positions(run: Run) -> str:
    return (
        "rope"
        if run.on("--use-rotary-position-embeddings")
        else run.text("--position-embedding-type", "learned_absolute")
    )


def _given_and(run: Run, number: str, flag: str, none: int = 0) -> bool:
    """`number` is given and no zero, and so is `flag`."""
    return run.size(number, 0) > 0 and run.size(flag, none) != none


_ATTENTION = (
    Demand(
        "--group-query-attention", lambda r: r.on(_MLA) and r.on("--group-query-attention"),
        "--group-query-attention with --multi-latent-attention", "Drop --group-query-attention.", since="0.16.0",
    ),
    Demand(
        "--rotary-interleaved", lambda r: r.on(_MLA) and r.on("--rotary-interleaved"),
        "--rotary-interleaved with --multi-latent-attention", "Drop --rotary-interleaved.",
    ),
    Demand(
        "--rotary-interleaved", lambda r: r.on("--rotary-interleaved") and not r.on("--no-rope-fusion"),
        "--rotary-interleaved with the fused rotary embedding, which is on by default", "Add --no-rope-fusion.",
        before="0.14.0",
    ),
    Demand(
        "--mtp-num-layers",
        lambda r: r.size("--mtp-num-layers", 0) > 0 and _positions(r) not in ("rope", "none"),
        "--mtp-num-layers with a --position-embedding-type other than rope or none",
        "Add --position-embedding-type rope.",
    ),
    Demand(
        "--mtp-num-layers", lambda r: r.size("--mtp-num-layers", 0) > 0 and r.cp > 1,
        "--mtp-num-layers with context parallelism", "Use --context-parallel-size 1.", before="0.14.0",
    ),
    Demand(
        "--position-embedding-type",
        lambda r: _positions(r) == "mrope" and not r.on("--mrope-section"),
        "--position-embedding-type mrope without --mrope-section", "Give --mrope-section.",
    ),
    Demand(
        "--position-embedding-type",
        lambda r: _positions(r) == "relative" and r.text("--transformer-impl", "transformer_engine") == "local",
        "--position-embedding-type relative with --transformer-impl local", "Use transformer_engine.",
    ),
    Demand(
        "--no-position-embedding", lambda r: r.on("--no-position-embedding") and _positions(r) != "rope",
        "--no-position-embedding, which is no longer a setting of its own",
        "Use --position-embedding-type rope or none.",
    ),
    Demand(
        "--hierarchical-context-parallel-sizes",
        lambda r: "a2a+p2p" in r.texts("--cp-comm-type", ("p2p",))
        and not r.on("--hierarchical-context-parallel-sizes"),
        "--cp-comm-type a2a+p2p without --hierarchical-context-parallel-sizes", "Give the sizes.",
    ),
    Demand(
        "--attention-backend",
        lambda r: r.text("--attention-backend", "auto") == "local" and r.texts("--spec")[:1] != ("local",),
        "--attention-backend local without --spec local", "Add --spec local, or use another backend.",
    ),
    Demand(
        "--rope-type", lambda r: r.text("--rope-type", "rope") != "rope" and not r.on(_MLA),
        f"a --rope-type other than rope without {_MLA}", "Use --position-embedding-type yarn.", *_READ,
    ),
    Demand(
        "--cp-comm-type",
        lambda r: r.cp > 1 and len(r.texts("--cp-comm-type")) not in (0, 1, r.size("--num-layers")),
        "--cp-comm-type has neither one word nor one for each of --num-layers", "Write one.", *_READ,
    ),
    Demand(
        _HYBRID, lambda r: r.on(_HYBRID) and not r.on("--calculate-per-token-loss"),
        f"{_HYBRID} without --calculate-per-token-loss", "Add it.", *_READ,
    ),
    Demand(
        _HYBRID, lambda r: r.on(_HYBRID) and (r.pp > 1 or r.on("--use-megatron-fsdp")),
        f"{_HYBRID} in a pipeline, or with Megatron-FSDP", "Drop one of the two.", *_READ,
    ),
    Demand(
        _VARIANT, lambda r: r.text(_VARIANT) == "gated_delta_net" and not r.on("--linear-attention-freq"),
        f"{_VARIANT} gated_delta_net without --linear-attention-freq", "Add it.", *_READ,
    ),
    Demand(
        _VARIANT, lambda r: r.text(_VARIANT) == "dsa" and r.cp > 1, f"{_VARIANT} dsa with context parallelism",
        "Use --context-parallel-size 1.", *_READ,
    ),
    Demand(
        "--attention-output-gate", lambda r: r.on("--attention-output-gate") and r.on(_MLA),
        f"--attention-output-gate with {_MLA}", "Drop one of the two.", *_READ,
    ),
    Demand(
        "--batch-invariant-mode",
        lambda r: r.on("--batch-invariant-mode") and r.text("--attention-backend", "auto") != "flash",
        "--batch-invariant-mode without --attention-backend flash", "Add it.", *_READ,
    ),
)  # fmt: skip
demands("megatron.attention", "Attention and positions that exclude each other.", _ATTENTION)


def _fused(run: Run) -> bool:
    """Whether the bias is fused into the activation, as it is unless a flag says otherwise."""
    if run.on("--swiglu"):
        return not run.on("--no-bias-swiglu-fusion")
    return not run.on("--no-bias-gelu-fusion", "--disable-bias-linear")


_LAYER = (
    Demand(
        "--squared-relu", lambda r: r.on("--squared-relu") and r.on("--swiglu"), "--squared-relu with --swiglu",
        "Keep one.", *_READ,
    ),
    Demand(
        "--squared-relu", lambda r: r.on("--squared-relu") and not r.on("--swiglu") and _fused(r),
        "--squared-relu with the fused bias of other activations", "Add --no-bias-gelu-fusion.", *_READ,
    ),
    Demand(
        _TE_ACTIVATION, lambda r: r.on(_TE_ACTIVATION) and _fused(r) and not r.on("--squared-relu"),
        f"{_TE_ACTIVATION} with a fused bias", "Add --no-bias-gelu-fusion, or --no-bias-swiglu-fusion.", *_READ,
    ),
    Demand(
        "--init-method-xavier-uniform", lambda r: r.on("--init-method-xavier-uniform"),
        "--init-method-xavier-uniform, of which the model's configuration knows no part; TypeError", "Drop it.",
        *_READ,
    ),
    Demand(
        "--encoder-num-layers", lambda r: r.on("--encoder-num-layers") and r.on("--num-layers"),
        "--encoder-num-layers beside --num-layers", "Keep one.", *_READ,
    ),
    Demand(
        "--encoder-seq-length", lambda r: r.on("--encoder-seq-length") and r.on("--seq-length"),
        "--encoder-seq-length beside --seq-length", "Keep one.", *_READ,
    ),
)  # fmt: skip
demands(
    "megatron.layer-options", "Activations, weights or sizes of a layer that exclude each other.", _LAYER,
    evidence=f"{ARGUMENTS}, {CONFIG} at core_v0.16.1, run",
)  # fmt: skip

_COURSE = (
    Demand(
        "--train-samples", lambda r: _given_and(r, "--train-iters", "--train-samples"),
        "--train-iters and --train-samples exclude each other", "Keep one.",
    ),
    Demand(
        "--lr-decay-samples", lambda r: _given_and(r, "--train-iters", "--lr-decay-samples"),
        "--lr-decay-samples in a training counted by --train-iters", "Use --lr-decay-iters.",
    ),
    Demand(
        "--lr-warmup-samples", lambda r: _given_and(r, "--train-iters", "--lr-warmup-samples"),
        "--lr-warmup-samples in a training counted by --train-iters", "Use --lr-warmup-iters.",
    ),
    Demand(
        "--rampup-batch-size", lambda r: r.size("--train-iters", 0) > 0 and r.on("--rampup-batch-size"),
        "--rampup-batch-size in a training counted by --train-iters", "Count it by --train-samples.",
        before="0.18.0",
    ),
    Demand(
        "--lr-decay-iters", lambda r: _given_and(r, "--train-samples", "--lr-decay-iters"),
        "--lr-decay-iters in a training counted by --train-samples", "Use --lr-decay-samples.",
    ),
    Demand(
        "--lr-warmup-iters", lambda r: _given_and(r, "--train-samples", "--lr-warmup-iters"),
        "--lr-warmup-iters in a training counted by --train-samples", "Use --lr-warmup-samples.",
    ),
    Demand(
        "--lr-warmup-fraction",
        lambda r: r.on("--lr-warmup-fraction")
        and (
            _given_and(r, "--train-iters", "--lr-warmup-iters")
            or _given_and(r, "--train-samples", "--lr-warmup-samples")
        ),
        "--lr-warmup-fraction beside a warm-up in iterations or samples", "Keep one.",
    ),
    Demand(
        "--log-memory-interval",
        lambda r: r.on("--log-memory-interval") and r.size("--log-interval", 100) > 0
        and r.size("--log-memory-interval") % r.size("--log-interval", 100) != 0,
        "--log-memory-interval is no multiple of --log-interval", "Write a multiple of it.",
    ),
)  # fmt: skip
demands("megatron.course", "The length of training, its warm-up, decay or logs counted in two ways.", _COURSE)

_DATA = (
    Demand(
        "--mock-data",
        lambda r: r.on("--mock-data")
        and r.on("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"),
        "--mock-data beside --data-path", "Keep one source of data.",
    ),
    Demand(
        "--fim-data", lambda r: r.on("--fim-data") and r.on("--mock-data"), "--fim-data with --mock-data",
        "Name real data, or drop --fim-data.", *_READ,
    ),
    Demand(
        "--data-path",
        lambda r: r.on("--data-path") and r.on("--train-data-path", "--valid-data-path", "--test-data-path"),
        "--data-path beside paths for each split", "Keep one of the two.",
    ),
    Demand(
        "--data-args-path", lambda r: r.on("--data-path") and r.on("--data-args-path"),
        "--data-path and --data-args-path exclude each other", "Keep one.",
    ),
    Demand(
        "--num-dataset-builder-threads", lambda r: r.size("--num-dataset-builder-threads", 1) < 1,
        "--num-dataset-builder-threads below 1", "Use 1 or more.",
    ),
)  # fmt: skip
demands("megatron.data", "More than one source of data, or none that can be read.", _DATA)

_DETERMINISTIC = (
    Demand(
        "--deterministic-mode",
        lambda r: r.on("--deterministic-mode") and r.on("--use-flash-attn"),
        "--deterministic-mode with --use-flash-attn", "Drop --use-flash-attn.", before="0.19.0",
    ),
    Demand(
        "--deterministic-mode",
        lambda r: r.on("--deterministic-mode") and r.on("--cross-entropy-loss-fusion"),
        "--deterministic-mode with --cross-entropy-loss-fusion", "Drop the fusion.",
    ),
    Demand(
        "--deterministic-mode",
        lambda r: r.on("--deterministic-mode") and r.on("--tp-comm-overlap"),
        "--deterministic-mode with --tp-comm-overlap", "Drop the overlap.", since="0.19.0",
    ),
    Demand(
        "--deterministic-mode",
        lambda r: r.on("--deterministic-mode") and r.environment("NCCL_ALGO") not in (None, *_ALGORITHMS),
        f"--deterministic-mode with an NCCL_ALGO other than {', '.join(_ALGORITHMS)}", "Export NCCL_ALGO=Ring.",
        before="0.19.0",
    ),
    Demand(
        "--deterministic-mode",
        lambda r: r.on("--deterministic-mode")
        and not set((r.environment("NCCL_ALGO") or "Ring").split(",")) <= set(_ALGORITHMS[1:]),
        f"--deterministic-mode with an NCCL_ALGO other than {', '.join(_ALGORITHMS[1:])}",
        "Export NCCL_ALGO=Ring.", since="0.19.0",
    ),
)  # fmt: skip
demands("megatron.deterministic", "Deterministic mode beside what is not deterministic.", _DETERMINISTIC)
