"""What our rules say of Megatron's sizes and flags, held against megatron-core, which says it for real."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st

from dslaunch.files.fileset import read_fileset
from dslaunch.rules.megatron.stages import BUILT
from dslaunch.rules.registry import rules
from dslaunch.rules.settings import Settings
from tests.cases.load import Case, all_cases
from tests.real.agreeing import Judged, agree
from tests.real.megatron_judge import judging
from tests.real.megatron_lines import COMMON, Line, lines
from tests.real.parts import need

CHECKOUT = os.environ.get("DSLAUNCH_MEGATRON_LM", "")
"""Folder of a checkout of NVIDIA/Megatron-LM at a tag core_vVERSION: its own parser then judges too."""
_LATER = frozenset({
    "megatron.microbatches", "megatron.expert-grid", "megatron.expert-sequence-parallel", "megatron.tokenizer",
    "megatron.saving", "megatron.schedule", "megatron.sources", "megatron.data-prefix", "megatron.entry-script",
    "megatron.model", "megatron.attention-kernel", "megatron.context-heads",
})  # fmt: skip
"""What Megatron says after its arguments are validated."""

_FORWARD = "first forward pass"
_ARGUMENTS_ALONE = (_FORWARD, BUILT, "of the ramp-up, ")

OPTIONS: dict[str, dict[str, Any]] = {
    "--disable-bias-linear": {"add_bias_linear": False, "bias_activation_fusion": False},
    "--num-experts 8": {"num_moe_experts": 8},
    "--num-experts 8 --disable-bias-linear": {
        "num_moe_experts": 8, "add_bias_linear": False, "bias_activation_fusion": False,
    },
    "--moe-ffn-hidden-size 128": {"moe_ffn_hidden_size": 128},
    "--moe-token-dispatcher-type alltoall": {"moe_token_dispatcher_type": "alltoall"},
    "--moe-token-dispatcher-type flex": {"moe_token_dispatcher_type": "flex"},
    "--moe-enable-deepep": {"moe_enable_deepep": True},
    "--moe-shared-expert-intermediate-size 128 --moe-shared-expert-overlap": {
        "moe_shared_expert_intermediate_size": 128, "moe_shared_expert_overlap": True,
    },
    "--moe-expert-capacity-factor 1.0": {"moe_expert_capacity_factor": 1.0},
    "--moe-pad-expert-input-to-capacity": {"moe_pad_expert_input_to_capacity": True},
    "--moe-router-load-balancing-type sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "--moe-router-topk 1": {"moe_router_topk": 1},
    "--moe-router-pre-softmax": {"moe_router_pre_softmax": True},
    "--moe-router-enable-expert-bias": {"moe_router_enable_expert_bias": True},
    "--moe-router-score-function sigmoid": {"moe_router_score_function": "sigmoid"},
    "--group-query-attention --num-query-groups 2": {"num_query_groups": 2},
    "--group-query-attention --num-query-groups 3": {"num_query_groups": 3},
    "--recompute-granularity full": {"recompute_granularity": "full"},
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": {
        "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
    },
    "--recompute-granularity selective --recompute-modules moe_act": {
        "recompute_granularity": "selective", "recompute_modules": ["moe_act"],
    },
    "--recompute-granularity selective --recompute-modules layernorm mla_up_proj": {
        "recompute_granularity": "selective", "recompute_modules": ["layernorm", "mla_up_proj"],
    },
    "--moe-grouped-gemm": {"moe_grouped_gemm": True},
    "--cpu-offloading-num-layers 2": {"cpu_offloading": True, "cpu_offloading_num_layers": 2},
    "--num-virtual-stages-per-pipeline-rank 2": {"virtual_pipeline_model_parallel_size": 2},
    "--decoder-first-pipeline-num-layers 2": {"num_layers_in_first_pipeline_stage": 2},
    "--decoder-last-pipeline-num-layers 3": {"num_layers_in_last_pipeline_stage": 3},
    "--account-for-embedding-in-pipeline-split": {"account_for_embedding_in_pipeline_split": True},
    "--account-for-loss-in-pipeline-split": {"account_for_loss_in_pipeline_split": True},
    "--overlap-moe-expert-parallel-comm": {"overlap_moe_expert_parallel_comm": True},
}  # fmt: skip
"""Flags that megatron-core's own configuration judges, and what they become in it."""


@dataclass(frozen=True)
class Sizes:
    """Degrees, a model's sizes and options."""

    tp: int
    pp: int
    ep: int
    layers: int
    heads: int
    micro: int
    batch: int
    options: tuple[str, ...]

    world = 144

    @property
    def line(self) -> Line:
        """The command line that says the same."""
        words = (
            f"--tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp} "
            f"--expert-model-parallel-size {self.ep} --num-layers {self.layers} --hidden-size 384 "
            f"--num-attention-heads {self.heads} --seq-length 1152 --micro-batch-size {self.micro} "
            f"--global-batch-size {self.batch} --bf16 {' '.join(self.options)}"
        ).split()
        if self.tp > 1:
            words.append("--sequence-parallel")
        return Line(self.world, (*COMMON, *words), (("CUDA_DEVICE_MAX_CONNECTIONS", "1"),))

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of TransformerConfig that say the same."""
        made = {
            "tensor_model_parallel_size": self.tp, "pipeline_model_parallel_size": self.pp,
            "expert_model_parallel_size": self.ep, "num_layers": self.layers, "hidden_size": 384,
            "num_attention_heads": self.heads, "bf16": True, "sequence_parallel": self.tp > 1,
        }  # fmt: skip
        for option in self.options:
            made |= OPTIONS[option]
        return made


def sizes() -> st.SearchStrategy[Sizes]:
    """Most of them fit."""
    return st.builds(
        Sizes,
        tp=st.sampled_from([1, 1, 1, 2, 4, 3]),
        pp=st.sampled_from([1, 1, 2, 4, 3]),
        ep=st.sampled_from([1, 1, 1, 2, 4]),
        layers=st.sampled_from([12, 12, 24, 7]),
        heads=st.sampled_from([12, 12, 12, 16, 6]),
        micro=st.sampled_from([1, 1, 2]),
        batch=st.sampled_from([288, 288, 144, 100]),
        options=st.lists(st.sampled_from(sorted(OPTIONS)), max_size=3, unique=True).map(
            _without_contradictions
        ),
    )


def _without_contradictions(options: list[str]) -> tuple[str, ...]:
    """Only the first of options that set the same flag."""
    kept: list[str] = []
    for option in options:
        flags = {word for word in option.split() if word.startswith("--")}
        if all(flags.isdisjoint(each.split()) for each in kept):
            kept.append(option)
    return tuple(kept)


def ours(line: Line, version: str, *, later: tuple[str, ...] = (_FORWARD,)) -> list[str]:
    """Our errors that Megatron raises before training, but for those that say they come later."""
    files = read_fileset({"launch.sh": f"#!/bin/bash\n{line.text}"})
    known = Settings(megatron_version=version, world_size=line.world)
    return [
        hit.message
        for rule in rules().values()
        if (rule.id.startswith("megatron.") or rule.id == "layout.ranks") and rule.id not in _LATER
        for hit in (rule.check(None, files, known) if rule.holds_for(known) else ())
        if (hit.severity or rule.severity) == "error" and not any(text in hit.message for text in later)
    ]


@pytest.fixture(scope="module")
def core() -> Callable[[Sizes], str | None]:
    """What megatron-core raises while the configuration and the schedule are made, or None."""
    need("megatron")
    import torch
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    def judge(given: Sizes) -> str | None:
        try:
            config = TransformerConfig(pipeline_dtype=torch.bfloat16, **given.config)
            for rank in range(given.pp):
                for stage in range(config.virtual_pipeline_model_parallel_size or 1):
                    virtual = stage if config.virtual_pipeline_model_parallel_size else None
                    get_num_layers_to_build(config, vp_stage=virtual, pp_rank=rank)
            if config.num_moe_experts and config.num_moe_experts % given.ep:
                return "experts"
            replicas = given.world // (given.tp * given.pp)
            ConstantNumMicroBatchesCalculator(given.batch, given.micro, replicas, False, 1)
        except (AssertionError, ValueError, ZeroDivisionError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    return judge


@pytest.mark.filterwarnings("ignore")
def test_generated_sizes_are_judged_as_megatron_core_judges_them(core: Callable[[Sizes], str | None]) -> None:
    def judged(given_sizes: Sizes) -> Judged | None:
        interleaved = "--num-virtual-stages-per-pipeline-rank 2" in given_sizes.options
        if interleaved and given_sizes.pp == 1:
            return None  # validate_args refuses it, the configuration alone does not
        return core(given_sizes), ours(given_sizes.line, "0.16.1")

    agree(sizes(), judged, examples=4000, first_seed=1, share=8)


def test_grids_are_judged_as_megatron_core_judges_them() -> None:
    need("megatron")
    import torch
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    seen: Counter[bool] = Counter()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=24)
    try:
        for tp, pp, ep, etp in itertools.product((1, 2, 3, 5), (1, 2, 4), (1, 2, 5), (1, 2)):
            words = (
                f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --num-experts 60 "
                f"--expert-model-parallel-size {ep} --expert-tensor-parallel-size {etp} --micro-batch-size 1"
            )
            files = read_fileset({"launch.sh": f"#!/bin/bash\ntorchrun pretrain_gpt.py {words}\n"})
            known = Settings(megatron_version="0.16.1", world_size=24)
            names = ("megatron.expert-grid", "layout.ranks")
            said = [hit for name in names for hit in rules()[name].check(None, files, known)]
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    parallel_state.initialize_model_parallel(
                        tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
                        create_gloo_process_groups=False,
                    )  # fmt: skip
                raised = False
            except RuntimeError:
                raised = True
            parallel_state.destroy_model_parallel()
            seen[raised] += 1
            assert bool(said) == raised, (words, said)
    finally:
        torch.distributed.destroy_process_group()
    assert min(seen.values()) > 5


CASES = [case for case in all_cases() if case.rule.startswith("megatron.")]


@pytest.fixture(scope="module")
def checkout() -> Iterator[Callable[[Line], dict[str, Any]]]:
    """Megatron-LM's own parse_args, validate_args and configuration, in a process of their own."""
    if not CHECKOUT:
        pytest.skip("DSLAUNCH_MEGATRON_LM names no checkout of Megatron-LM")
    with judging("megatron_worker.py", CHECKOUT) as judge:
        yield judge


def test_command_lines_are_judged_as_megatron_judges_them(checkout: Callable[[Line], dict[str, Any]]) -> None:
    version = os.environ["DSLAUNCH_MEGATRON_VERSION"]

    def judged(line: Line) -> Judged:
        return checkout(line)["raised"], ours(line, version, later=_ARGUMENTS_ALONE)

    agree(lines(), judged, examples=1000, first_seed=1, share=8)


def _line_of(case: Case) -> Line | None:
    """The command line of a case that Megatron's parser judges."""
    files = read_fileset(case.files)
    found = list(files.megatron())
    if len(found) != 1 or not found[0][1].complete:
        return None
    file, arguments = found[0]
    if not file.assignments:
        return None  # what the environment holds isn't known, and Megatron stops where it holds nothing
    words = tuple(word for flag in arguments.flags for word in (flag.name, *flag.values))
    return Line(
        case.settings.world_size or 8, words, tuple((each.name, each.value) for each in file.assignments)
    )


def test_cases_are_judged_as_megatron_judges_them(checkout: Callable[[Line], dict[str, Any]]) -> None:
    version, judged = os.environ["DSLAUNCH_MEGATRON_VERSION"], 0
    for case in CASES:
        line = _line_of(case)
        told = line is not None and not any("$" in word for word in line.words)  # of a loop's pass nothing is
        if line is not None and told and case.settings.megatron_version == version:
            raised, said = checkout(line)["raised"], ours(line, version, later=_ARGUMENTS_ALONE)
            assert bool(said) == (raised is not None), (case.rule, case.name, raised, said)
            judged += 1
    print(f"core {version}: {judged} cases")
