"""Every recipe that is shipped: described, with its sources; planned and rendered, at each size it pins."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from dslaunch.conffiles import names
from dslaunch.paths import data_root
from dslaunch.planfile import Plan, Prediction
from tests.command import CommandLine, make_site
from tests.golden.cases import planned

RECIPES = names("recipes")
TEXTS = {name: (data_root() / "recipes" / f"{name}.yaml").read_text(encoding="utf-8") for name in RECIPES}
OWN = {"vla70b", "vla_tiny"}
"""Models of dslaunch's own: nobody else published how to train them."""
TREES = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
VARIANTS = [name for name, tree in TREES.items() if tree["defaults"][0] in RECIPES]
"""Recipes that change another one."""
ADAPTERS = [name for name in RECIPES if name.endswith(("_lora", "_qlora"))]
SIZES = [(name, size) for name, tree in TREES.items() for size in tree.get("layouts", {})]
FILE = re.compile(r"[\w-]+/[\w.-]+:[\w./-]+\.(?:py|sh|ya?ml|mdx?)@[\w.-]+")
"""A file of a repository, with the version that was read."""
TOO_LARGE = {("vla70b", 16)}
"""Published layouts that do not fit by the ledger, which says so."""
TOKENS = {
    "gpt3_175b": 3.2e6,  # arXiv:2005.14165 table 2.1
    "llama3_405b": 16.8e6,  # arXiv:2407.21783 table 4: 16M, of 2**20
    "deepseek_v3": 62.9e6,  # arXiv:2412.19437 section 4.2: 15,360 sequences of 4K
}
"""Tokens of a step, as published."""
TRAINED = {
    "openvla_7b_lora": 110_828_288,  # printed by openvla's vla-scripts/finetune.py
    "gpt3_175b_lora": 37_748_736,  # arXiv:2106.09685 table 4: 37.7M
}
"""Parameters that train, as published."""
ONE_EPOCH = [
    *("llama3_8b_sft", "llama3_8b_lora", "llama3_8b_qlora"),
    *("llama3_70b_sft", "llama3_70b_lora", "llama3_405b_qlora"),
]
"""Recipes that follow torchtune, which trains for one epoch of alpaca-cleaned."""


@cache
def plan_of(recipe: str) -> tuple[Plan, Prediction]:
    plan, prediction, _ = planned(f"recipe={recipe}")
    return plan, prediction


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_is_named_after_its_file_and_described(recipe: str, dslaunch: CommandLine) -> None:
    assert TREES[recipe]["name"] == recipe
    (line,) = [line for line in dslaunch("recipes").out.splitlines() if line.split()[0] == recipe]
    assert len(line.split()) > 3


def header(recipe: str) -> str:
    """The comment that a recipe starts with, as one line."""
    return TEXTS[recipe].split("defaults:")[0].replace("\n# ", " ")


@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - OWN))
def test_header_says_where_the_settings_were_published(recipe: str) -> None:
    """In a paper, or in a file of a repository, or as another recipe has them."""
    published = re.search(r"arXiv:\d{4}\.\d{5}", header(recipe)) or FILE.search(header(recipe))
    assert published or (recipe in VARIANTS and any(f"recipe {other}" in header(recipe) for other in RECIPES))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_file_is_cited_with_repository_and_version(recipe: str) -> None:
    words = [word.strip("(),;.") for word in header(recipe).split()]
    files = [word for word in words if "=" not in word and re.search(r"\.(py|sh|ya?ml|mdx?)\b", word)]
    assert [word for word in files if not FILE.fullmatch(word)] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_renders_on_its_own_cluster(recipe: str, dslaunch: CommandLine, tmp_path: Path) -> None:
    ran = dslaunch("render", f"recipe={recipe}", "-o", str(tmp_path / "out"))
    assert ran.status == 0, ran.err
    assert dslaunch("check", str(tmp_path / "out")).status == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_plan_fits_its_gpus_and_hosts_and_its_batch_is_whole(recipe: str) -> None:
    plan, prediction = plan_of(recipe)
    assert prediction.peak_memory_gib <= 0.95 * prediction.gpu_memory_gib
    assert not [f for f in prediction.findings if f.severity in ("error", "warning")]
    for each in plan.components.values():
        assert each.micro_batch * each.num_microbatches * each.dp == plan.global_batch


@pytest.mark.parametrize(("recipe", "gpus"), SIZES)
def test_pinned_size_fits_or_is_known_not_to(recipe: str, gpus: int, dslaunch: CommandLine) -> None:
    ran = dslaunch("plan", f"recipe={recipe}", f"cluster.gpus={gpus}", "--json")
    errors = {finding["rule"] for finding in ran.json["findings"] if finding["severity"] == "error"}
    assert ran.json["world_size"] == gpus
    assert (ran.status, errors) == ((3, {"memory.gpu"}) if (recipe, gpus) in TOO_LARGE else (0, set()))


@pytest.mark.parametrize("recipe", VARIANTS)
def test_a_variant_says_what_trains_and_leaves_the_shapes_alone(recipe: str) -> None:
    changed = TREES[recipe].get("model", {}).get("components", {}).values()
    assert set().union(*changed) <= {"train", "lora", "lr"}


@pytest.mark.parametrize("recipe", ADAPTERS)
def test_adapters_are_a_small_share_of_the_language_model(recipe: str) -> None:
    llm = plan_of(recipe)[0].components["llm"]
    assert 0 < llm.trainable < 0.02 * llm.params


@pytest.mark.parametrize(("recipe", "tokens"), TOKENS.items())
def test_a_step_takes_the_published_number_of_tokens(recipe: str, tokens: float) -> None:
    training = plan_of(recipe)[0].training
    assert training.global_batch * training.seq_len == pytest.approx(tokens, rel=0.02)


@pytest.mark.parametrize("recipe", ONE_EPOCH)
def test_steps_are_one_epoch(recipe: str) -> None:
    training = plan_of(recipe)[0].training
    assert training.steps == 51_760 // training.global_batch


@pytest.mark.parametrize(("recipe", "trained"), TRAINED.items())
def test_as_many_parameters_train_as_the_authors_count(recipe: str, trained: int) -> None:
    assert sum(each.trainable for each in plan_of(recipe)[0].components.values()) == trained


def test_components_have_rates_of_their_own() -> None:
    rates = {name: each.lr for name, each in plan_of("qwen2_5_vl_7b")[0].components.items() if each.trainable}
    assert rates == {"projector": 1e-5, "llm": 2e-7}


def test_a_sites_recipe_starts_from_one_of_ours(dslaunch: CommandLine, tmp_path: Path) -> None:
    mine = "defaults:\n  - llama3_8b_lora\n  - override cluster: 8xA100\n  - _self_\nname: mine\n"
    site = make_site(tmp_path / "site", mine)
    ran = dslaunch("plan", "--config-dir", str(site), "recipe=mine", "--json")
    assert ran.status == 0, ran.err
    assert ran.json["components"]["llm"]["dp"] == 8
