"""Which code ran."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from dslaunch.run.code import record_code


def _git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_revision_and_uncommitted_changes_are_kept(tmp_path: Path) -> None:
    checkout, run = tmp_path / "code", tmp_path / "run"
    (checkout / "sub").mkdir(parents=True)
    run.mkdir()
    (checkout / "train.py").write_text("print(1)\n")
    _git(checkout, "init", "-q")
    _git(checkout, "add", ".")
    _git(checkout, "commit", "-qm", "one")
    record_code(run, checkout / "sub")
    clean = json.loads((run / "code.json").read_text())
    assert clean["revision"] == _git(checkout, "rev-parse", "HEAD")
    assert (clean["changed"], clean["untracked"]) == (False, [])
    assert not (run / "code.diff").exists()

    (checkout / "train.py").write_text("print(2)\n")
    (checkout / "sub" / "né w.py").write_text("")
    record_code(run, checkout / "sub")
    changed = json.loads((run / "code.json").read_text())
    assert (changed["changed"], changed["untracked"]) == (True, ["sub/né w.py"])
    assert "+print(2)" in (run / "code.diff").read_text()


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("TOKEN = 'sk-q1w2e3r4q1w2e3r4q1w2e3r4'", "TOKEN = '<secret>'"),
        ("export WANDB_API_KEY=f0e1d2c3f0e1d2c3", "export WANDB_API_KEY=<secret>"),
        ('{"hf-token": "A1b2C3d4A1b2C3d4"}', '{"hf-token": "<secret>"}'),
        ("git clone https://me:pw1@host/x", "git clone <secret>host/x"),
        ("api_key = os.environ['WANDB_API_KEY']", "api_key = os.environ['WANDB_API_KEY']"),
        ("secret_key: wJalrXUtnFEMI7K7MDENG/bPxRfi", "secret_key: <secret>"),
        ("image_token = tokenizer_of_llava  # 7b", "image_token = tokenizer_of_llava  # 7b"),
        ("learning_rate: 0.0000000001e5", "learning_rate: 0.0000000001e5"),
    ],
)
def test_a_secret_that_was_not_committed_is_not_copied(line: str, kept: str, tmp_path: Path) -> None:
    checkout, run = tmp_path / "code", tmp_path / "run"
    checkout.mkdir()
    run.mkdir()
    (checkout / "train.py").write_text("print(1)\n")
    _git(checkout, "init", "-q")
    _git(checkout, "add", ".")
    _git(checkout, "commit", "-qm", "one")
    (checkout / "train.py").write_text(f"{line}\n")
    record_code(run, checkout)
    assert f"+{kept}\n" in (run / "code.diff").read_text()
    assert json.loads((run / "code.json").read_text())["hidden"] == (line != kept)


def test_without_a_checkout_or_git_the_revision_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_code(tmp_path, tmp_path)
    assert json.loads((tmp_path / "code.json").read_text())["revision"] == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    record_code(tmp_path, tmp_path / "missing")
    assert json.loads((tmp_path / "code.json").read_text())["revision"] == ""
