"""The run folder and its proof."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dslaunch.errors import ConfigError
from dslaunch.run.folder import create, planned, verify, write_files
from tests.launching import HOSTILE, make_files, make_plan, put

_NOON = datetime(2026, 1, 2, 12, 0, 5, tzinfo=UTC)


def test_runs_of_the_same_second_get_names_of_their_own(tmp_path: Path) -> None:
    assert planned(tmp_path / "runs", "a", _NOON).name == "a-20260102-120005"
    assert not (tmp_path / "runs").exists()
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: create(tmp_path / "runs", "a", _NOON), range(8)))
    numbered = {f"a-20260102-120005-{n}" for n in range(2, 9)}
    assert {folder.name for folder in made} == {"a-20260102-120005"} | numbered
    assert all((folder / "logs").is_dir() for folder in made)
    assert planned(tmp_path / "runs", "a", _NOON).name == "a-20260102-120005-9"


def test_a_root_that_is_a_file_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match=r"run\.root: no run folder can be made"):
        create(tmp_path / "runs", "a")


def test_files_are_written_whole_and_scripts_can_be_run(tmp_path: Path) -> None:
    write_files(tmp_path, {"launch.sh": "old", "plan.json": "old"})
    write_files(tmp_path, {"launch.sh": "é\r\n", "plan.json": "{}"})
    assert (tmp_path / "launch.sh").read_bytes() == "é\r\n".encode()
    assert sorted(os.listdir(tmp_path)) == ["launch.sh", "plan.json"]
    assert os.access(tmp_path / "launch.sh", os.X_OK)
    assert (tmp_path / "plan.json").stat().st_mode & 0o111 == 0


def test_a_rendered_folder_is_read_as_it_is(tmp_path: Path) -> None:
    files = make_files(make_plan(), launch_sh="é\r\n")
    folder = put(tmp_path / HOSTILE, files)
    (folder / "launch.sh").write_bytes("é\r\n".encode())
    assert verify(folder) == files


_FAULTS = ["changed", "missing", "not text", "no manifest", "not JSON", "outside", "newer"]


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_folder_that_is_not_as_rendered_is_refused(fault: str, tmp_path: Path) -> None:
    folder = put(tmp_path / "out", make_files(make_plan(), launch_sh="echo\n"))
    manifest = json.loads((folder / "manifest.json").read_text())
    outside = {**manifest, "files": {"../launch.sh": "0"}}
    message = {
        "changed": "launch.sh: changed since it was rendered.*Render again, or",
        "missing": "launch.sh: No such file",
        "not text": "launch.sh: not UTF-8",
        "no manifest": "manifest.json: No such file",
        "not JSON": "manifest.json: not a manifest",
        "outside": "no plain file name",
        "newer": "schema is 'dslaunch.manifest/9'",
    }[fault]
    match fault:
        case "changed":
            (folder / "launch.sh").write_text("echo \n")
        case "missing":
            (folder / "launch.sh").unlink()
        case "not text":
            (folder / "launch.sh").write_bytes(b"\xff")
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "not JSON":
            (folder / "manifest.json").write_text("[]")
        case "outside":
            (folder / "manifest.json").write_text(json.dumps(outside))
        case "newer":
            (folder / "manifest.json").write_text(json.dumps({**manifest, "schema": "dslaunch.manifest/9"}))
    with pytest.raises(ConfigError, match=message):
        verify(folder)


@pytest.mark.parametrize("name", ["rank.sh", "plan.json", "job.sbatch", "env.sh", "ds_config.json", "hostfile"])
def test_a_file_that_the_manifest_leaves_out_is_refused(name: str, tmp_path: Path) -> None:
    files = make_files(make_plan(), ds_config_json="{}", hostfile="a slots=2\n")
    files["ds_config.json"] = files.pop("ds.config.json")
    manifest = json.loads(files["manifest.json"])
    manifest["files"]["ds_config.json"] = manifest["files"].pop("ds.config.json")
    folder = put(tmp_path / "out", {**files, "manifest.json": json.dumps(manifest), "notes.txt": "mine"})
    assert set(verify(folder)) == set(files)
    del manifest["files"][name]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / name).write_text("echo changed")
    with pytest.raises(ConfigError, match=f"manifest.json: does not name {name}"):
        verify(folder)


@pytest.mark.parametrize(("hashes", "message"), [({"rank.sh": 3}, "files.rank.sh is 3"), ([], "files is")])
def test_a_manifest_of_other_values_is_refused(hashes: object, message: str, tmp_path: Path) -> None:
    files = make_files(make_plan())
    files["manifest.json"] = json.dumps({"schema": "dslaunch.manifest/1", "files": hashes})
    with pytest.raises(ConfigError, match=message):
        verify(put(tmp_path / "out", files))
