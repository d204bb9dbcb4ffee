"""A site's templates: one replaced at a time, and every mistake in one named by file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.errors import ConfigError
from tests.golden.cases import rendered

TINY = ["recipe=vla_tiny", "cluster=local"]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "my site's templates"
    folder.mkdir()
    return folder


def test_one_template_is_replaced_and_the_others_stay(site: Path) -> None:
    (site / "env.sh.j2").write_text("{## ours ##}\nexport RANKS={{ world_size }} N=${#list[@]}\n")
    files = rendered(*TINY, site_templates=site)
    assert files["env.sh"] == "export RANKS=2 N=${#list[@]}\n"
    assert files["launch.sh"] == rendered(*TINY)["launch.sh"]


@pytest.mark.parametrize(
    ("name", "text", "where", "message"),
    [
        ("env.sh.j2", "a\n{{ wold_size }}\n", ":2:", "'wold_size' is undefined"),
        ("env.sh.j2", "a\nb\n{% if %}\n", ":3:", "Correct the template"),
        ("env.sh.j2", "a\n{{ name + 1 }}\n", ":2:", "can only concatenate str"),
        ("env.sh.j2", "{% include 'no.j2' %}\n", "no.j2", "no such template"),
        ("ds_config.json.j2", "{{ config }}\n", "ds_config.json.j2", "not JSON"),
        ("ds_config.json.j2", '{"train_batch_size": 32}\n', "", "key data_types is missing"),
        ("hostfile.j2", "localhost slots=8\n", "hostfile.j2", "'localhost slots=2' was planned"),
    ],
)
def test_a_mistake_is_named_by_file(site: Path, name: str, text: str, where: str, message: str) -> None:
    (site / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        rendered(*TINY, site_templates=site)
    assert message in str(caught.value)
    assert where in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"betas": [0.9, 0.95]', '"betas": [0.9, 0.99]', "key optimizer.params.betas is [0.9, 0.99], planned is"),
        ('"stage": 1', '"stage": 1, "round_robin_gradients": true', "round_robin_gradients is not planned"),
        ('"stage": 1', '"stage": true', "key zero_optimization.stage is true, planned is 1"),
    ],
)
def test_a_template_cannot_change_what_was_planned(site: Path, old: str, new: str, message: str) -> None:
    planned = rendered(*TINY)["ds_config.json"]
    assert old in planned
    (site / "ds_config.json.j2").write_text(planned.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        rendered(*TINY, site_templates=site)
    assert message in str(caught.value)
    assert "engine.extra.KEY=VALUE" in str(caught.value)


def test_a_template_may_lay_the_same_values_out_otherwise(site: Path) -> None:
    text = rendered(*TINY)["ds_config.json"].replace("\n", " ")
    (site / "ds_config.json.j2").write_text(text)
    assert rendered(*TINY, site_templates=site)["ds_config.json"] == text
