"""strategy=auto for each recipe: no slower than what the recipe pins, or a clear refusal."""

from __future__ import annotations

import pytest

from dslaunch.conffiles import names
from dslaunch.errors import PlanError
from dslaunch.flow import Request, configured
from dslaunch.plan.planner import plan
from dslaunch.planfile import Prediction

RECIPES = [name for name in names("recipes") if name != "vla_tiny"]
QUICK = ["llama3_8b", "llama3_70b", "mixtral_8x7b", "openvla_7b"]


def predicted(*words: str) -> Prediction | PlanError:
    try:
        return plan(configured(Request(words, None, (), ())))[1]
    except PlanError as error:
        return error


def compare(recipe: str, cluster: str) -> None:
    words = [f"recipe={recipe}", *([cluster] if cluster else [])]
    sharding = configured(Request(tuple(words), None, (), ())).strategy.sharding
    pinned = predicted(*words)
    searched = predicted(*words, "strategy=auto", f"strategy.sharding={sharding}")
    if isinstance(searched, PlanError):
        assert str(searched).startswith("strategy=auto: no")
        assert isinstance(pinned, PlanError) or not fits(pinned)
        return
    if not fits(searched):  # the error band alone lets it fit
        assert [f.severity for f in searched.findings if f.rule == "memory.gpu"] == ["memory"]
        assert isinstance(pinned, PlanError) or not fits(pinned)
        return
    assert searched.search is not None
    assert "chosen" in searched.search.engines.values()
    if isinstance(pinned, Prediction) and fits(pinned):
        assert searched.step_time_s <= pinned.step_time_s * (1 + 1e-9)


def fits(prediction: Prediction) -> bool:
    in_host = prediction.host_memory_gib <= prediction.host_limit_gib
    return prediction.peak_memory_gib <= prediction.memory_limit_gib and in_host


@pytest.mark.parametrize("recipe", QUICK)
def test_a_search_is_no_slower_than_the_recipes_own_layout(recipe: str) -> None:
    compare(recipe, "")


def test_vla70b_on_64_gpus_says_which_engines_run_it_and_which_do_not() -> None:
    compare("vla70b", "cluster=64xA100")
    searched = predicted("recipe=vla70b", "cluster=64xA100", "strategy=auto")
    assert isinstance(searched, Prediction)
    assert searched.search is not None
    engines = searched.search.engines
    assert "takes a single decoder" in engines["megatron"]
    assert engines["megatron_mimo"].startswith("not searched: it runs your entry beside Megatron-LM's")
    assert list(engines.values()).count("chosen") == 1
    scripted = predicted("recipe=vla70b", "cluster=64xA100", "strategy=auto", "script=train.py")
    assert isinstance(scripted, Prediction)
    assert scripted.search is not None
    assert not scripted.search.engines["megatron_mimo"].startswith("not searched")
    assert scripted.search.engines["native"].startswith("not searched: train.py would have to make an engine")


def test_components_beside_a_pinned_trunk_have_each_zero_stage_that_the_engine_takes() -> None:
    """dslaunch.runtime has no ZeRO-0 in bf16: that alone does not put the engine out."""
    words = ("recipe=vla70b", "cluster=64xA100", "strategy=auto", "strategy.llm.pp=8")
    pinned, searched = predicted("recipe=vla70b", "cluster=64xA100"), predicted(*words)
    assert isinstance(pinned, Prediction)
    assert isinstance(searched, Prediction)
    assert searched.search is not None
    assert searched.search.engines["native"] == "chosen"
    assert searched.search.engines["deepspeed"] == "refused: strategy.llm.pp is 8; deepspeed takes pp 1"
    assert searched.step_time_s < pinned.step_time_s


def test_who_shards_is_searched_and_a_pin_is_kept() -> None:
    words = ("recipe=llama3_8b", "cluster=2x8xH100", "strategy=auto", "engine=torch")
    free = predicted(*words)
    assert isinstance(free, Prediction)
    assert free.candidates[0].layout.startswith(("torch ddp", "torch fsdp2", "torch hsdp over"))
    for sharding in ("ddp", "fsdp2", "hsdp"):
        pinned = predicted(*words, f"strategy.sharding={sharding}")
        if isinstance(pinned, PlanError):
            assert sharding == "ddp", pinned
            continue
        assert pinned.candidates[0].layout.startswith(f"torch {sharding}")
        assert free.step_time_s <= pinned.step_time_s * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [8, 16, 64, 256, 1024])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_at_every_size(recipe: str, gpus: int) -> None:
    compare(recipe, f"cluster={gpus}xH100")
