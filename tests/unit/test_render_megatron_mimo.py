"""Two grids on ranks of their own: their flags, and what they must be to one another."""

from __future__ import annotations

from typing import Any

import pytest

from dslaunch.engines.megatron_catalogue import megatron_mimo_catalogue
from dslaunch.errors import ConfigError, PlanError
from tests.golden.cases import CASES, rendered
from tests.megatron_parser import parsed

WORDS = CASES["vla70b_megatron_mimo"]


def flags(*words: str) -> dict[str, Any]:
    """Read by the parser of core 0.19 and its example, as far as the catalogue tells."""
    return parsed(rendered(*WORDS, *words)["megatron_args.txt"], megatron_mimo_catalogue("0.19.0"))


def test_each_grid_has_its_flags_and_the_stock_sizes_stay_1() -> None:
    made = flags()
    expected = {
        "--encoder-tp": 4, "--encoder-dp": 2, "--llm-offset": 8, "--llm-tp": 8, "--llm-cp": 1, "--llm-pp": 4,
        "--llm-dp": 2, "--llm-ep": 1, "--image-seq-length": 256, "--use-distributed-optimizer": True,
        "--calculate-per-token-loss": True, "--micro-batch-size": 1, "--global-batch-size": 512,
    }  # fmt: skip
    assert {flag: made.get(flag) for flag in expected} == expected
    assert made["--encoder-tp"] * made["--encoder-dp"] == made["--llm-offset"]
    stock = {f"--{n}-model-parallel-size" for n in ("tensor", "pipeline", "expert")} | {"--context-parallel-size"}
    assert not stock & made.keys()


def test_the_shipped_recipe_has_the_grids_of_megatrons_example() -> None:
    text = rendered("recipe=llava_1_5_7b", "data.path=/d", "data.tokenizer=/t")["megatron_args.txt"]
    made = parsed(text, megatron_mimo_catalogue("0.19.0"))
    expected = {
        "--encoder-tp": 2, "--encoder-dp": 2, "--llm-offset": 4, "--llm-tp": 2, "--llm-pp": 1, "--llm-dp": 2,
        "--image-seq-length": 576, "--freeze-vit": True, "--global-batch-size": 128,
    }  # fmt: skip
    assert {flag: made.get(flag) for flag in expected} == expected
    assert "--freeze-projection" not in made


def test_what_is_frozen() -> None:
    assert not {"--freeze-vit", "--freeze-projection", "--freeze-lm"} & flags().keys()
    made = flags("model.components.vision_encoder.train=nothing")
    assert made["--freeze-vit"] is True
    assert "--freeze-lm" not in made


def test_a_script_of_ones_own_is_asked_for() -> None:
    assert "registers a provider" in rendered(*WORDS, "script=")["launch.sh"]
    assert '-u train_vlm.py "${arguments[@]}"' in rendered(*WORDS)["rank.sh"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy.llm.rank_offset=0", "strategy.llm.dp=2"], "wants each of 72 ranks once"),
        (["strategy.llm.dp=1"], "wants each of 72 ranks once"),
        (["strategy.llm.cp=2"], "takes cp 1"),
        (["strategy.vision_encoder.zero=2"], "takes 1"),
        (["strategy.projector.tp=2"], "differs from strategy.vision_encoder in tp"),
        (
            [f"strategy.{n}.{k}" for n in ("vision_encoder", "projector") for k in ("tp=2", "dp=4")],
            "micro_batch 1 x dp 2 (llm) = 2 samples, and 2 / 4 = 0.5",
        ),
        (
            [f"strategy.{n}.{k}" for n in ("vision_encoder", "projector") for k in ("tp=8", "dp=1")],
            "vision_encoder.micro_batch is 1: its replicas share out the 2 samples of one micro-batch; give 2",
        ),
        (["model.components.vision_encoder.lr=1e-6"], "learning rates differ"),
        (["recipe=llama3_8b", "model=llama3_8b"], "takes one vision tower"),
        (["engine.version=0.16.0"], "megatron_mimo is rendered for 0.19.0"),
        (["engine.extra.llm-tp=2"], "strategy.COMPONENT.tp"),
    ],
)
def test_what_it_cannot_do_is_refused(words: list[str], message: str) -> None:
    other_model = words[0].startswith("recipe=")
    start = [word for word in WORDS if not (other_model and word.startswith(("recipe=", "strategy.")))]
    with pytest.raises((ConfigError, PlanError)) as caught:
        rendered(*start, *words)
    assert message in str(caught.value)
