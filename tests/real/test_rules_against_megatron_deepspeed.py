"""What our rules say of Megatron-DeepSpeed's command lines, held against its own parser and validation."""

from __future__ import annotations

import os

import pytest
from hypothesis import strategies as st

from dslaunch.files.fileset import read_fileset
from dslaunch.rules.registry import rules
from dslaunch.rules.settings import Settings
from tests.real.agreeing import Judged, agree
from tests.real.megatron_judge import judging
from tests.real.megatron_lines import Line
from tests.real.parts import need

CHECKOUT = os.environ.get("DSLAUNCH_MEGATRON_DEEPSPEED", "")
"""Folder of a checkout of deepspeedai/Megatron-DeepSpeed."""
_RULES = (
    "megatron-deepspeed.arguments", "megatron-deepspeed.zero-bubble", "layout.ranks", "megatron.value",
    "megatron.unknown-flag", "megatron.batch", "megatron.missing-flag", "megatron.connections",
)  # fmt: skip
_BASE = (
    "--num-layers 8", "--hidden-size 1024", "--num-attention-heads 16", "--seq-length 1024",
    "--max-position-embeddings 1024", "--micro-batch-size 1", "--global-batch-size 64",
    "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 4", "--lr 1e-4", "--data-path d",
    "--vocab-file v", "--merge-file m", "--deepspeed_config ds.json",
)  # fmt: skip
_MORE = (
    # sizes
    "--num-attention-heads 15", "--num-attention-heads 8", "--hidden-size 1000", "--kv-channels 64",
    "--num-key-value-heads 4", "--num-key-value-heads 5", "--num-key-value-heads 3", "--seq-length 2048",
    "--max-position-embeddings 512", "--max-position-embeddings 2048", "--encoder-num-layers 4",
    "--encoder-seq-length 4", "--global-batch-size 0", "--micro-batch-size 0", "--num-layers 10",
    # degrees
    "--tensor-model-parallel-size 1", "--tensor-model-parallel-size 4", "--tensor-model-parallel-size 3",
    "--pipeline-model-parallel-size 1", "--pipeline-model-parallel-size 2", "--no-pipeline-parallel",
    "--pipeline-model-parallel-size 1 --no-pipeline-parallel", "--ds-sequence-parallel-size 1",
    "--ds-sequence-parallel-size 2", "--pipeline-model-parallel-size 2 --ds-sequence-parallel-size 2",
    "--num-layers-per-virtual-pipeline-stage 1", "--num-layers-per-virtual-pipeline-stage 3",
    "--sequence-parallel", "--pipeline-model-parallel-split-rank 1", "--pipeline-model-parallel-split-rank 4",
    "--enable-zbh1-pipeline", "--enable-zbh1-exact-semantics",
    "--enable-zbh1-pipeline --enable-zbh1-exact-semantics",
    # number formats and optimizer
    "--fp16-lm-cross-entropy", "--fp32-residual-connection", "--accumulate-allreduce-grads-in-fp32",
    "--DDP-impl torch", "--DDP-impl local", "--DDP-impl FSDP", "--no-contiguous-buffers-in-local-ddp",
    "--use-distributed-optimizer", "--start-weight-decay 0.1", "--end-weight-decay 0.1", "--fp8-e4m3",
    "--weight-decay-incr-style linear", "--weight-decay-incr-style constant", "--weight-decay-incr-style cosine",
    "--fp8-hybrid", "--transformer-impl local", "--transformer-impl transformer_engine",
    # course
    "--train-samples 1000", "--lr-decay-samples 10", "--lr-decay-iters 10", "--lr-warmup-iters 0",
    "--lr-warmup-iters 5", "--lr-warmup-samples 0", "--lr-warmup-samples 5", "--lr-warmup-fraction 0.1",
    "--rampup-batch-size 16 16 100", "--rampup-batch-size 16 16", "--min-lr 1", "--min-lr 1e-5", "--save d",
    "--save d --save-interval 10",
    # recompute
    "--distribute-checkpointed-activations", "--checkpoint-activations", "--recompute-granularity full",
    "--recompute-granularity selective", "--recompute-method uniform", "--recompute-method block",
    "--recompute-activations", "--distribute-saved-activations",
    "--distribute-saved-activations --recompute-granularity full --recompute-method uniform",
    # experts and teachers
    "--num-experts 4", "--num-experts 2 4", "--num-experts 1", "--moe-expert-parallel-size 2", "--topk 2",
    "--mlp-type residual", "--mlp-type dense", "--moe-loss-coeff x", "--kd", "--mos", "--kd-temp 2",
    "--num-layers-teacher 4", "--kd --num-key-value-heads 4",
    # gone
    "--batch-size 4", "--warmup 4", "--model-parallel-size 2",
    # what it adds for DeepSpeed
    "--zero-stage 2", "--zero-stage two", "--zero-reduce-scatter", "--zero-contigious-gradients",
    "--zero-contiguous-gradients", "--zero-reduce-bucket-size 5e8", "--zero-reduce-bucket-size 500000000",
    "--zero-allgather-bucket-size 0", "--remote-device cpu", "--remote-device disk", "--remote-device nvme",
    "--use-pin-memory", "--scattered-embeddings", "--split-transformers", "--memory-centric-tiled-linear",
    "--tile-factor 4", "--tile-factor 1.5", "--deepspeed-activation-checkpointing", "--partition-activations",
    "--contigious-checkpointing", "--contiguous-checkpointing", "--checkpoint-in-cpu", "--checkpoint-num-layers 2",
    "--synchronize-each-layer", "--profile-backward", "--deepspeed_activation_checkpointing",
    "--deepspeed_mpi", "--deepscale", "--deepscale_config ds.json", "--local_rank 0", "--cpu-optimizer",
    "--cpu_torch_adam", "--create-moe-param-group", "--universal-checkpoint", "--no-bf16-zero",
    "--force-ds-sequence-parallel", "--ds-inference", "--hidden-dropout 0.1 0.2",
    "--use-rotary-position-embeddings",
)  # fmt: skip


@st.composite
def _lines(draw: st.DrawFn) -> Line:
    """A line that fits most of the time, without one of its flags now and then, and up to three more."""
    given = {each.split()[0]: each for each in _BASE}
    if draw(st.integers(0, 6)) == 0:
        del given[draw(st.sampled_from(sorted(given)))]
    words = [
        *given.values(),
        "--zero-stage 1",
        draw(st.sampled_from(["--bf16", "--bf16", "--fp16", "--log-interval 1"])),
    ]
    words += draw(st.sampled_from([["--train-iters 100"]] * 4 + [["--train-samples 1000"], []]))
    words += draw(st.lists(st.sampled_from(_MORE), max_size=3, unique=True))
    words += draw(st.sampled_from([["--deepspeed"]] * 9 + [[]]))
    connections = (("CUDA_DEVICE_MAX_CONNECTIONS", draw(st.sampled_from(["1", "1", "1", "8"]))),)
    return Line(8, tuple(word for each in words for word in each.split()), connections)


def _ours(line: Line) -> list[str]:
    """Our errors, and flags that a fork might have, which are information."""
    files = read_fileset({"launch.sh": f"#!/bin/bash\n{line.text}"})
    known = Settings(world_size=line.world)
    return [
        f"{name}: {hit.message}"
        for name in _RULES
        for hit in rules()[name].check(None, files, known)
        if (hit.severity or rules()[name].severity) == "error" or name == "megatron.unknown-flag"
    ]


def test_command_lines_are_judged_as_megatron_deepspeed_judges_them() -> None:
    if not CHECKOUT:
        pytest.skip("DSLAUNCH_MEGATRON_DEEPSPEED names no checkout of Megatron-DeepSpeed")
    need("deepspeed")
    with judging("megatron_deepspeed_worker.py", CHECKOUT) as judge:

        def judged(line: Line) -> Judged:
            return judge(line)["raised"], _ours(line)

        agree(_lines(), judged, examples=1000, first_seed=1, share=8)
