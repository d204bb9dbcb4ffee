"""YAML as it is written reads back the same, through YAML and through Hydra; files are put in place whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from dslaunch.errors import ConfigError
from dslaunch.importing.writing import refuse_existing, staged, write_site, yaml_text

TREES: list[dict[str, Any]] = [
    {"lr": 1e-5, "eps": 1e-08, "one": 1.0, "digits": 4.5e-05, "big": 500000000, "nothing": None, "yes": True},
    {
        "quoted": "12:00:00",
        "octal": "0123",
        "off": "no",
        "tilde": "~",
        "empty": "",
        "hash": "a # b",
        "colon": "a: b",
    },
    {"quotes": 'it\'s "so"', "tab": "a\tb", "unicode": "Jülich", "line": "two\nlines", "long": "word " * 60},
    {"args": ["--a", "1", "--b", "x y", "{ds_config}"], "pair": (1, 2), "none": []},
    {"args": [f"--option-number-{i}" for i in range(40)]},
    {
        "deep": {"a": {"b": {"c": 1}}, "list": [{"from": "x", "to": "y"}, {"from": "z", "to": "w"}]},
        "empty": {},
    },
    {"layouts": {64: {"llm": {"tp": 8, "pp": 4}}}},
]


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("tree", TREES)
def test_text_reads_back(tree: dict[str, Any]) -> None:
    text = yaml_text(tree, ["A head,", "of two lines"])
    assert yaml.safe_load(text) == plain(tree)
    assert OmegaConf.to_container(OmegaConf.create(text)) == plain(tree)
    assert max(map(len, (line for line in text.splitlines() if "word" not in line)), default=0) <= 115


def test_an_interpolation_stays_text() -> None:
    text = yaml_text({"a": "${HOME}/x"})
    assert OmegaConf.to_container(OmegaConf.create(text), resolve=True) == {"a": "${HOME}/x"}


def test_a_head_never_leaves_its_comment() -> None:
    assert yaml.safe_load(yaml_text({"a": 1}, ["first\nb: 2"])) == {"a": 1}


def test_a_stage_has_the_site_and_the_new_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "old.yaml").write_text("old: 1\n")
    with staged(tmp_path, {"recipes/new.yaml": "new: 1\n", "conf/model/m.yaml": "m: 1\n"}) as stage:
        found = sorted(str(path.relative_to(stage)) for path in stage.rglob("*.yaml"))
    assert found == ["conf/model/m.yaml", "recipes/new.yaml", "recipes/old.yaml"]
    assert not stage.exists()
    assert [path.name for path in tmp_path.rglob("*.yaml")] == ["old.yaml"]


def test_files_are_written_whole(tmp_path: Path) -> None:
    write_site(tmp_path, {"recipes/new.yaml": "new: 1\n"})
    assert [(path.name, path.read_text()) for path in (tmp_path / "recipes").iterdir()] == [
        ("new.yaml", "new: 1\n")
    ]
    with pytest.raises(ConfigError, match=r"new\.yaml: is there already"):
        refuse_existing(tmp_path, ["recipes/new.yaml"], force=False)
    refuse_existing(tmp_path, ["recipes/new.yaml"], force=True)


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipes" / "new.yaml").mkdir(parents=True)
    with pytest.raises(ConfigError, match="a folder stands where the file belongs"):
        refuse_existing(tmp_path, ["recipes/new.yaml"], force=True)


@pytest.mark.parametrize(
    ("value", "text"), [(4.5e-05, "4.5e-05"), (1e-05, "1.0e-05"), (1e22, "1.0e+22"), (0.25, "0.25")]
)
def test_a_small_number_is_written_as_short_as_it_is(value: float, text: str) -> None:
    assert yaml_text({"lr": value}) == f"lr: {text}\n"
