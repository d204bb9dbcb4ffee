"""What is rendered, byte for byte, against tests/golden; `pytest --update-golden` writes it anew."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden.cases import CASES, NOT_GOLDEN, rendered

GOLDEN = Path(__file__).parent.parent / "golden"


@pytest.mark.parametrize("case", CASES)
def test_files_are_the_golden_ones(case: str, update_golden: bool) -> None:
    files = {name: text for name, text in rendered(*CASES[case]).items() if name not in NOT_GOLDEN}
    folder = GOLDEN / case
    if update_golden:
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)
    for name, text in files.items():
        assert (folder / name).read_text(encoding="utf-8") == text, name


def test_the_same_bytes_in_another_process_folder_home_and_hash_seed(tmp_path: Path) -> None:
    case = CASES["llama3_8b_zero3"]
    code = (
        "import json, sys; from tests.golden.cases import rendered;"
        "json.dump(rendered(*json.loads(sys.argv[1])), sys.stdout)"
    )
    root = GOLDEN.parent.parent
    env = {**os.environ, "HOME": str(tmp_path), "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(case)], cwd=tmp_path, env=env, capture_output=True, check=True
    )
    assert json.loads(done.stdout) == rendered(*case)


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_this_machine_is_in_a_file(case: str) -> None:
    for name, text in rendered(*CASES[case]).items():
        assert str(Path.home()) + "/" not in text, name
        assert str(GOLDEN.parent.parent) not in text, name
        assert os.uname().nodename not in text, name


def test_the_manifest_names_every_other_file_by_its_hash() -> None:
    files = rendered(*CASES["vla70b_64xA100"])
    manifest = json.loads(files.pop("manifest.json"))
    assert manifest["schema"] == "dslaunch.manifest/1"
    assert manifest["files"] == {n: hashlib.sha256(t.encode()).hexdigest() for n, t in files.items()}
