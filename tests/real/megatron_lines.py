"""Generated command lines of Megatron-LM: sizes that often fit, and flags that its validation combines."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from hypothesis import strategies as st

COMMON = (
    "--max-position-embeddings", "4096", "--lr", "1e-4", "--tokenizer-type", "NullTokenizer",
    "--vocab-size", "32000", "--log-interval", "1",
)  # fmt: skip

OPTIONS = (
    # number formats
    "--fp8-format hybrid", "--fp8-format e4m3 --fp8-recipe tensorwise", "--fp8-param-gather",
    "--first-last-layers-bf16", "--fp16-lm-cross-entropy", "--fp32-residual-connection",
    "--accumulate-allreduce-grads-in-fp32", "--main-grads-dtype bf16", "--fp4-format e2m1", "--fp4-param-gather",
    # recompute and offload
    "--recompute-activations", "--recompute-granularity full", "--recompute-granularity selective",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-method block", "--recompute-num-layers 2", "--distribute-saved-activations",
    "--recompute-granularity selective --recompute-modules moe_act",
    "--recompute-granularity selective --recompute-modules layernorm mla_up_proj",
    "--recompute-granularity selective --recompute-modules core_attn shared_experts",
    "--moe-layer-recompute", "--cpu-offloading-num-layers 1",
    # optimizer
    "--use-distributed-optimizer", "--use-distributed-optimizer", "--use-precision-aware-optimizer",
    "--optimizer-cpu-offload", "--weight-decay-incr-style linear",
    "--weight-decay-incr-style cosine --start-weight-decay 0.1 --end-weight-decay 0.2",
    "--start-weight-decay 0.1", "--min-lr 1e-5", "--min-lr 1e-3", "--optimizer sgd", "--optimizer muon",
    "--optimizer dist_muon",
    # overlap
    "--overlap-grad-reduce", "--overlap-grad-reduce", "--overlap-param-gather",
    "--overlap-param-gather-with-optimizer-step", "--tp-comm-overlap", "--defer-embedding-wgrad-compute",
    "--overlap-p2p-communication-warmup-flush", "--no-overlap-p2p-communication",
    "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute", "--sequence-parallel", "--sequence-parallel",
    # FSDP and checkpoints
    "--use-torch-fsdp2", "--use-custom-fsdp", "--use-megatron-fsdp --ckpt-format fsdp_dtensor",
    "--use-megatron-fsdp", "--no-gradient-accumulation-fusion", "--untie-embeddings-and-output-weights",
    "--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights",
    "--fsdp-manual-registration", "--nccl-ub", "--ckpt-format torch", "--ckpt-format torch_dcp",
    "--ckpt-format fsdp_dtensor", "--save out --save-interval 10", "--save out", "--save-retain-interval 30",
    "--save-retain-interval 15", "--disable-gloo-process-groups", "--load-main-params-from-ckpt",
    "--no-load-optim",
    "--non-persistent-ckpt-type local", "--non-persistent-ckpt-type global",
    "--non-persistent-ckpt-type in_memory",
    "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir ram",
    "--replication", "--replication-jump 2", "--replication --replication-jump 2",
    "--save out --save-interval 0", "--use-legacy-models",
    "--use-legacy-models --ckpt-format torch", "--dist-ckpt-optim-fully-reshardable", "--async-save",
    "--disable-gloo-process-groups --distrib-optim-fully-reshardable-mem-efficient --use-distributed-optimizer",
    # experts
    "--num-experts 8", "--num-experts 8 --disable-bias-linear", "--num-experts 8 --disable-bias-linear",
    "--num-experts 6 --expert-tensor-parallel-size 1", "--disable-bias-linear", "--moe-grouped-gemm",
    "--expert-tensor-parallel-size 1", "--moe-ffn-hidden-size 128", "--moe-enable-deepep",
    "--moe-token-dispatcher-type alltoall", "--moe-token-dispatcher-type flex",
    "--moe-shared-expert-intermediate-size 128", "--moe-shared-expert-overlap", "--moe-expert-capacity-factor 1.0",
    "--moe-expert-capacity-factor -1", "--moe-pad-expert-input-to-capacity", "--moe-router-topk 1",
    "--moe-router-pre-softmax", "--moe-router-load-balancing-type sinkhorn",
    "--moe-router-load-balancing-type global_aux_loss", "--moe-router-load-balancing-type none",
    "--moe-router-group-topk 2", "--moe-router-num-groups 4", "--moe-router-num-groups 3",
    "--moe-router-group-topk 8", "--moe-router-enable-expert-bias", "--moe-router-score-function sigmoid",
    "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.1",
    "--moe-router-load-balancing-type aux_loss seq_aux_loss", "--moe-router-padding-for-fp8",
    "--moe-use-upcycling", "--moe-latent-size 64",
    # attention and positions
    "--group-query-attention --num-query-groups 2", "--group-query-attention --num-query-groups 3",
    "--group-query-attention", "--num-query-groups 4", "--kv-channels 64", "--multi-latent-attention",
    "--rotary-interleaved", "--mtp-num-layers 1", "--position-embedding-type rope",
    "--position-embedding-type rope", "--position-embedding-type none", "--position-embedding-type mrope",
    "--position-embedding-type mrope --mrope-section 8 8 8", "--position-embedding-type relative",
    "--transformer-impl local", "--no-position-embedding", "--use-rotary-position-embeddings",
    "--cp-comm-type a2a+p2p", "--hierarchical-context-parallel-sizes 2 1",
    # course and data
    "--train-iters 100", "--train-iters 100", "--train-samples 1000", "--lr-decay-iters 50",
    "--lr-decay-samples 500", "--lr-warmup-iters 5", "--lr-warmup-samples 5", "--lr-warmup-fraction 0.1",
    "--rampup-batch-size 8 8 100", "--mock-data", "--data-path x", "--train-data-path x",
    "--num-dataset-builder-threads 0", "--num-dataset-builder-threads 2", "--deterministic-mode",
    "--use-flash-attn", "--cross-entropy-loss-fusion", "--decrease-batch-size-if-needed",
    # pipelines
    "--num-layers-per-virtual-pipeline-stage 1", "--num-layers-per-virtual-pipeline-stage 2",
    "--num-virtual-stages-per-pipeline-rank 2", "--num-virtual-stages-per-pipeline-rank 1",
    "--decoder-first-pipeline-num-layers 2", "--decoder-last-pipeline-num-layers 3",
    "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2",
    "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
    "--microbatch-group-size-per-virtual-pipeline-stage 8",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One start of Megatron."""

    world: int
    words: tuple[str, ...]
    environ: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        """As a shell script, without what starts it."""
        exports = "".join(f"export {name}={value}\n" for name, value in self.environ)
        return f"{exports}torchrun --nproc-per-node 8 pretrain_gpt.py {shlex.join(self.words)}\n"


def _size(flag: str, *values: int) -> st.SearchStrategy[list[str]]:
    return st.sampled_from(values).map(lambda value: [flag, str(value)])


_SIZES = (
    _size("--tensor-model-parallel-size", *[1] * 5, 2, 2, 2, 4, 4, 3),
    _size("--pipeline-model-parallel-size", *[1] * 6, 2, 2, 2, 4, 3),
    _size("--context-parallel-size", 1, 1, 1, 1, 1, 2),
    _size("--expert-model-parallel-size", *[1] * 8, 2, 4),
    _size("--num-layers", 8, 8, 8, 8, 8, 12, 12, 7),
    _size("--hidden-size", *[256] * 15, 250),
    _size("--num-attention-heads", *[8] * 7, 12),
    _size("--seq-length", *[1024] * 12, 1022, 8192),
    _size("--micro-batch-size", *[1] * 8, *[2] * 7, 0),
    _size("--global-batch-size", *[64] * 10, 48, 12),
)
_ENVIRON = st.sampled_from([
    *[(("CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("NCCL_ALGO", "Ring"))] * 8,
    (("CUDA_DEVICE_MAX_CONNECTIONS", "8"), ("NCCL_ALGO", "Ring")),
    (("CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("NCCL_ALGO", "Tree")),
    (("CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("NCCL_ALGO", "CollNet")),
])  # fmt: skip


@st.composite
def lines(draw: st.DrawFn) -> Line:
    """Sizes, a number format most of the time, and up to four options."""
    words = [word for size in _SIZES for word in draw(size)]
    words += draw(st.sampled_from([*[["--bf16"]] * 12, ["--fp16"], [], ["--fp16", "--bf16"]]))
    for option in draw(st.lists(st.sampled_from(OPTIONS), max_size=4, unique=True)):
        words += option.split()
    return Line(draw(st.sampled_from([8, 16, 32, 64, 24])), (*COMMON, *words), draw(_ENVIRON))
