"""Megatron's checks of overlap, FSDP and pipelines against each other."""

from __future__ import annotations

from dslaunch.rules.megatron.checkpoints import checkpoint_format
from dslaunch.rules.megatron.demands import Demand, demands
from dslaunch.rules.megatron.run import Run
from dslaunch.rules.megatron.stages import virtual_stages

_FSDP = ("--use-megatron-fsdp", "--use-custom-fsdp")
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_HASHES = "--check-weight-hash-across-dp-replicas-interval"
_EARLY = "--ep-overlap-early-attn-memory-release"


def _sequence_parallel(run: Run) -> bool:
    """As Megatron leaves it: tensor-model-parallel-size 1 turns it off."""
    return run.on("--sequence-parallel") and run.tp > 1


_OVERLAP = (
    Demand(
        _EARLY, lambda r: r.on(_EARLY) and not r.on("--overlap-moe-expert-parallel-comm"),
        f"{_EARLY} without --overlap-moe-expert-parallel-comm", "Add it, or drop this.",
        since="0.16.0", before="0.17.0",
    ),
    Demand(
        "--overlap-param-gather",
        lambda r: r.on("--overlap-param-gather") and not r.on("--use-distributed-optimizer"),
        "--overlap-param-gather without --use-distributed-optimizer", "Add it.", before="0.14.0",
    ),
    Demand(
        "--overlap-param-gather",
        lambda r: r.on("--overlap-param-gather")
        and not r.on("--use-distributed-optimizer", "--use-megatron-fsdp"),
        "--overlap-param-gather without --use-distributed-optimizer or --use-megatron-fsdp",
        "Add --use-distributed-optimizer.", since="0.14.0", before="0.17.0",
    ),
    Demand(
        "--overlap-param-gather",
        lambda r: r.on("--overlap-param-gather") and not r.on("--use-distributed-optimizer", "--use-megatron-fsdp")
        and r.text("--optimizer", "adam") != "dist_muon",
        "--overlap-param-gather without --use-distributed-optimizer or --use-megatron-fsdp",
        "Add --use-distributed-optimizer.", since="0.17.0",
    ),
    Demand(
        "--overlap-param-gather", lambda r: r.on("--overlap-param-gather") and not r.on("--overlap-grad-reduce"),
        "--overlap-param-gather without --overlap-grad-reduce", "Add --overlap-grad-reduce.",
    ),
    Demand(
        "--overlap-param-gather-with-optimizer-step",
        lambda r: r.on("--overlap-param-gather-with-optimizer-step")
        and not (r.on("--overlap-param-gather") and r.on("--use-distributed-optimizer") and virtual_stages(r) > 1),
        "--overlap-param-gather-with-optimizer-step needs --use-distributed-optimizer, --overlap-param-gather and "
        "virtual pipeline stages", "Add them, or drop it.",
    ),
    Demand(
        "--overlap-param-gather-with-optimizer-step",
        lambda r: r.on("--overlap-param-gather-with-optimizer-step") and checkpoint_format(r) != "torch",
        "--overlap-param-gather-with-optimizer-step with a distributed checkpoint format",
        "Use --ckpt-format torch, or drop it.",
    ),
    Demand(
        "--tp-comm-overlap", lambda r: r.on("--tp-comm-overlap") and not _sequence_parallel(r),
        "--tp-comm-overlap without sequence parallelism (which tensor-model-parallel-size 1 turns off)",
        "Add --sequence-parallel with a tensor-model-parallel-size above 1.",
    ),
    Demand(
        "--defer-embedding-wgrad-compute", lambda r: r.on("--defer-embedding-wgrad-compute") and r.pp == 1,
        "--defer-embedding-wgrad-compute without a pipeline", "Drop it.",
    ),
    Demand(
        "--overlap-p2p-communication-warmup-flush",
        lambda r: r.on("--overlap-p2p-communication-warmup-flush")
        and (virtual_stages(r) == 1 or r.on("--no-overlap-p2p-communication")),
        "--overlap-p2p-communication-warmup-flush without an interleaved schedule that overlaps", "Drop it.",
    ),
    Demand(
        "--overlap-moe-expert-parallel-comm",
        lambda r: r.on("--overlap-moe-expert-parallel-comm") and r.ep == 1,
        "--overlap-moe-expert-parallel-comm at expert-model-parallel-size 1", "Drop it.",
    ),
    Demand(
        "--overlap-moe-expert-parallel-comm",
        lambda r: r.on("--overlap-moe-expert-parallel-comm") and r.pp > 1 and virtual_stages(r) == 1,
        "--overlap-moe-expert-parallel-comm in a pipeline without virtual stages",
        "Add --num-virtual-stages-per-pipeline-rank 2.",
    ),
    Demand(
        "--overlap-moe-expert-parallel-comm",
        lambda r: r.on("--overlap-moe-expert-parallel-comm")
        and r.text("--moe-token-dispatcher-type", "allgather") == "allgather",
        "--overlap-moe-expert-parallel-comm with the token dispatcher allgather",
        "Use --moe-token-dispatcher-type alltoall.",
    ),
    Demand(
        "--overlap-moe-expert-parallel-comm",
        lambda r: r.on("--overlap-moe-expert-parallel-comm") and r.text("--recompute-granularity") == "full",
        "--overlap-moe-expert-parallel-comm with --recompute-granularity full", "Recompute selectively.",
    ),
    Demand(
        "--overlap-moe-expert-parallel-comm",
        lambda r: r.on("--overlap-moe-expert-parallel-comm") and r.on("--moe-shared-expert-overlap"),
        "--overlap-moe-expert-parallel-comm with --moe-shared-expert-overlap", "Drop one of the two.",
    ),
    Demand(
        "--delay-wgrad-compute",
        lambda r: r.on("--delay-wgrad-compute") and not r.on("--overlap-moe-expert-parallel-comm"),
        "--delay-wgrad-compute without --overlap-moe-expert-parallel-comm", "Drop it.", since="0.14.0",
    ),
)  # fmt: skip
demands("megatron.overlap", "Overlapped communication without what it overlaps with.", _OVERLAP)

_FSDP_DEMANDS = (
    Demand(
        "--use-torch-fsdp2", lambda r: r.on("--use-torch-fsdp2") and r.pp > 1,
        "--use-torch-fsdp2 in a pipeline", "Use --pipeline-model-parallel-size 1.",
    ),
    Demand(
        "--use-torch-fsdp2", lambda r: r.on("--use-torch-fsdp2") and r.ep > 1,
        "--use-torch-fsdp2 with expert parallelism", "Use --expert-model-parallel-size 1.",
    ),
    Demand(
        "--use-torch-fsdp2", lambda r: r.on("--use-torch-fsdp2") and r.on("--use-distributed-optimizer"),
        "--use-torch-fsdp2 with --use-distributed-optimizer, which would shard once more",
        "Drop --use-distributed-optimizer.",
    ),
    Demand(
        "--use-torch-fsdp2",
        lambda r: r.on("--use-torch-fsdp2") and not r.on("--no-gradient-accumulation-fusion"),
        "--use-torch-fsdp2 with gradient accumulation fusion, which is on by default",
        "Add --no-gradient-accumulation-fusion.",
    ),
    Demand(
        "--use-torch-fsdp2",
        lambda r: r.on("--use-torch-fsdp2") and checkpoint_format(r) not in ("torch_dist", "torch_dcp"),
        "--use-torch-fsdp2 with a --ckpt-format other than torch_dist or torch_dcp", "Use torch_dist.",
    ),
    Demand(
        "--use-torch-fsdp2",
        lambda r: r.on("--use-torch-fsdp2") and not r.on("--untie-embeddings-and-output-weights"),
        "--use-torch-fsdp2 with tied embeddings", "Add --untie-embeddings-and-output-weights.",
    ),
    Demand(
        "--use-torch-fsdp2", lambda r: r.on("--use-torch-fsdp2") and r.on("--fp16"),
        "--use-torch-fsdp2 with --fp16", "Use --bf16.",
    ),
    Demand(
        "--use-torch-fsdp2", lambda r: r.on("--use-torch-fsdp2") and r.environment(_CONNECTIONS) == "1",
        f"--use-torch-fsdp2 with {_CONNECTIONS}=1", f"Leave {_CONNECTIONS} unset.",
    ),
    Demand(
        "--use-custom-fsdp", lambda r: r.on("--use-custom-fsdp") and not r.on("--use-distributed-optimizer"),
        "--use-custom-fsdp without --use-distributed-optimizer", "Add --use-distributed-optimizer.",
    ),
    Demand(
        "--use-megatron-fsdp", lambda r: r.on(*_FSDP) and r.environment(_CONNECTIONS) == "1",
        f"Megatron-FSDP with {_CONNECTIONS}=1", f"Leave {_CONNECTIONS} unset.",
    ),
    Demand(
        "--use-megatron-fsdp", lambda r: r.on("--use-megatron-fsdp") and checkpoint_format(r) != "fsdp_dtensor",
        "--use-megatron-fsdp with a --ckpt-format other than fsdp_dtensor", "Add --ckpt-format fsdp_dtensor.",
    ),
    Demand(
        "--fsdp-manual-registration",
        lambda r: r.on("--fsdp-manual-registration")
        and not (r.on("--use-megatron-fsdp") and r.on("--use-nccl-ub")),
        "--fsdp-manual-registration without --use-megatron-fsdp and --use-nccl-ub", "Add both, or drop it.",
    ),
    Demand(
        _HASHES, lambda r: r.on(*_FSDP) and r.on(_HASHES), f"Megatron-FSDP with {_HASHES}", f"Drop {_HASHES}.",
        since="0.16.0", before="0.17.0",
    ),
)  # fmt: skip
demands("megatron.fsdp", "FSDP beside what it does not go with.", _FSDP_DEMANDS)
