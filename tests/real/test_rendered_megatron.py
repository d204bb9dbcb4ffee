"""Megatron's arguments, read by a parser made from its own catalogue, by TransformerConfig and RankGenerator."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from typing import Any

import pytest

from dslaunch.engines.catalogue import Argument, megatron_arguments
from tests.golden.cases import planned, rendered
from tests.real.parts import need

need("torch", "megatron")

LLAMA = ["recipe=llama3_70b", "cluster=64xA100", "engine=megatron", "data.path=/d/x", "data.tokenizer=/tok"]
CASES = {
    "published": [],
    "interleaved": ["strategy.llm.vpp=2", "training.schedule=interleaved"],
    "uneven": ["strategy.llm.layers_per_stage=[19,21,21,19]"],
    "two_uneven_stages": ["strategy.llm.pp=2", "strategy.llm.layers_per_stage=[41,39]"],
    "full_recompute": ["strategy.llm.recompute=full"],
    "fp16": ["training.precision=fp16"],
    "context_parallel": ["strategy.llm.tp=4", "strategy.llm.cp=2"],
    "replicated": ["strategy.llm.zero=0"],
}
_TYPES = {"int": int, "float": float, "str": str}


def parser() -> argparse.ArgumentParser:
    """Megatron-LM's parser, core 0.16, from its catalogue: types, choices and number of values."""
    made = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for argument in dict.fromkeys(megatron_arguments("0.16.0").values()):
        made.add_argument(*argument.flags, dest=argument.flags[0], **_options(argument))
    return made


def _options(argument: Argument) -> dict[str, Any]:
    if argument.nargs == "0":
        return {"action": "store_true"}
    number = int(argument.nargs) if argument.nargs.isdigit() else argument.nargs or None
    choices = argument.choices if argument.type in _TYPES or not argument.type else None
    return {"type": _TYPES.get(argument.type, str), "nargs": number, "choices": choices or None}


def parsed(*words: str) -> dict[str, Any]:
    """Flag -> value, of the flags that stand in megatron_args.txt."""
    text = rendered(*LLAMA, *words)["megatron_args.txt"]
    lines = [shlex.split(line) for line in text.splitlines()]
    values = vars(parser().parse_args([word for line in lines for word in line]))
    return {flag: values[flag] for flag in (line[0] for line in lines)}


def transformer_config(flags: dict[str, Any]) -> Any:
    """megatron-core's TransformerConfig, from the flags whose names are its fields, and those that are not."""
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    fields = {flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items()}
    known = {name: value for name, value in fields.items() if name in names}
    del known["attention_backend"]  # an enum, which the script's parser converts
    return TransformerConfig(
        **known,
        add_bias_linear="--disable-bias-linear" not in flags,
        gated_linear_unit="--swiglu" in flags,
        layernorm_epsilon=flags["--norm-epsilon"],
        num_layers_in_first_pipeline_stage=flags.get("--decoder-first-pipeline-num-layers"),
        num_layers_in_last_pipeline_stage=flags.get("--decoder-last-pipeline-num-layers"),
        virtual_pipeline_model_parallel_size=flags.get("--num-virtual-stages-per-pipeline-rank"),
        pipeline_dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("case", CASES)
def test_megatron_core_takes_the_model_and_cuts_it_as_planned(case: str) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    plan, _, _ = planned(*LLAMA, *CASES[case])
    component = plan.components["llm"]
    config = transformer_config(parsed(*CASES[case]))
    vpp = component.vpp
    built = [
        sum(get_num_layers_to_build(config, vp if vpp > 1 else None, stage) for vp in range(vpp))
        for stage in range(component.pp)
    ]
    assert built == [stage.layers for stage in component.stages]
    assert (config.num_query_groups, config.kv_channels, config.ffn_hidden_size) == (8, 128, 28672)


@pytest.mark.parametrize("case", CASES)
def test_ranks_stand_where_megatron_puts_them(case: str) -> None:
    from megatron.core.parallel_state import RankGenerator

    plan, _, _ = planned(*LLAMA, *CASES[case])
    component = plan.components["llm"]
    flags = parsed(*CASES[case])
    names = ("tensor-model-parallel", "pipeline-model-parallel", "context-parallel")
    tp, pp, cp = (flags[f"--{name}-size"] for name in names)
    assert (tp, pp, cp) == (component.tp, component.pp, component.cp)
    ranks = RankGenerator(tp=tp, ep=1, dp=component.dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    stages = [sorted(stage) for stage in zip(*ranks.get_ranks("pp"), strict=True)]
    assert stages == [sorted(stage.ranks) for stage in component.stages]
    assert ranks.get_ranks("tp")[0] == list(range(component.tp))


def test_the_parser_of_this_test_can_refuse() -> None:
    for words in (["--num-layers", "many"], ["--lr-decay-style", "cosin"], ["--bf16", "1"], ["--no-such-flag"]):
        with pytest.raises((argparse.ArgumentError, SystemExit)):
            parser().parse_args(words)
