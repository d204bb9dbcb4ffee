"""A rendered folder that someone changed: `check` and `launch` say what is wrong, and nothing leaves run.root."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from dslaunch.errors import ConfigError
from dslaunch.planfile import plan_from_json, to_json
from tests.command import CommandLine
from tests.launching import make_files, make_plan, put


def _with(path: str, value: Any) -> str:
    """plan.json with another value at the dotted `path`."""
    plan = json.loads(to_json(make_plan()))
    *parents, last = path.split(".")
    owner = plan
    for key in parents:
        owner = owner[key]
    owner[last] = value
    return json.dumps(plan)


_CHANGES = [
    ("components", 3),
    ("components", {}),
    ("components.llm", []),
    ("components.llm.stages", 5),
    ("cluster.hosts", 5),
    ("cluster.hosts", "n1"),
    ("training.betas", [0.9]),
    ("cluster.gpus_per_node", 0),
    ("world_size", -1),
    ("model", []),
    ("name", "../../x"),
    ("name", ""),
]


@pytest.mark.parametrize(("key", "value"), _CHANGES)
def test_a_value_that_no_plan_has_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"DIR/plan.json.{key}: .*Render it again") as caught:
        plan_from_json(_with(key, value), "DIR/plan.json")
    assert caught.value.status == 2


@pytest.mark.parametrize(
    ("key", "value"), [("components", 3), ("name", "../../x"), ("launcher.name", "mesos")]
)
def test_a_changed_plan_with_its_hash_is_not_launched(
    key: str, value: Any, dslaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = make_files(make_plan())
    files["plan.json"] = _with(key, value)
    manifest = json.loads(files["manifest.json"])
    manifest["files"]["plan.json"] = hashlib.sha256(files["plan.json"].encode()).hexdigest()
    put(tmp_path / "out", {**files, "manifest.json": json.dumps(manifest)})
    ran = dslaunch("launch out")
    assert ran.status == 2, ran.err
    assert f"plan.json.{key}: {value!r}" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _render(dslaunch: CommandLine, folder: Path) -> None:
    assert dslaunch("render", "recipe=vla_tiny", "cluster=local", "-o", str(folder)).status == 0
    assert dslaunch("check", str(folder)).status == 0


@pytest.mark.parametrize("name", ["rank.sh", "prediction.json", "ds_config.json"])
def test_check_misses_a_file_of_the_manifest(name: str, dslaunch: CommandLine, tmp_path: Path) -> None:
    _render(dslaunch, tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    ran = dslaunch("check", str(tmp_path / "out"))
    assert ran.status == 6
    assert f"{name} isn't in the folder" in ran.out
    assert "dslaunch diff" not in ran.out


def test_check_finds_a_file_that_the_manifest_leaves_out(dslaunch: CommandLine, tmp_path: Path) -> None:
    _render(dslaunch, tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"]["rank.sh"]
    path.write_text(json.dumps(manifest))
    ran = dslaunch("check", str(tmp_path / "out"))
    assert ran.status == 6
    assert "rank.sh isn't listed" in ran.out
    path.unlink()
    ran = dslaunch("check", str(tmp_path / "out"))
    assert ran.status == 6
    assert "manifest.json" in ran.out
