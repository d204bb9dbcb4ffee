"""What is staged to the nodes' own disks, and what cannot be."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from dslaunch.launch.stage import Staged, pack
from dslaunch.launch.steps import Pack
from tests.command import CommandLine

WORDS = ["recipe=vla_tiny", "cluster=2x4xA100", "training.micro_batch=4", "module=", "script=train.py"]
STAGE = ["launcher.stage.from=.", "launcher.stage.to=/local/scratch"]


def _packed(source: Path, run: Path, *exclude: str) -> list[str]:
    run.mkdir(parents=True)
    pack(Pack(run, source, source / "src", exclude), lambda _: None)
    with tarfile.open(run / "stage.tar") as archive:
        return sorted(name.removeprefix("./") for name in archive.getnames())


def test_the_archive_leaves_out_patterns_and_the_runs(tmp_path: Path) -> None:
    for name in ("src/train.py", "src/a/b.tmp", ".git/config", "data/x", "data/secret/key", "old/run/stage.tar"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to("nowhere")
    run = tmp_path / "old" / "new"
    found = _packed(tmp_path, run, ".git", "*.tmp", "data/secret")
    assert found == ["data", "data/x", "link", "src", "src/a", "src/train.py"]
    about = Staged.read(run)
    assert (about.inside, about.bytes) == ("src", (run / "stage.tar").stat().st_size)
    digest = subprocess.run(["sha256sum", run / "stage.tar"], capture_output=True, text=True, check=True).stdout
    assert digest.startswith(about.sha256)
    (tmp_path / "src" / "later.py").touch()
    pack(Pack(run, tmp_path, tmp_path, ()), lambda _: None)
    assert Staged.read(run) == about  # a resume runs the same code


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launcher.stage.to=/local"], "from is missing"),
        (["launcher.stage.from=.", "launcher.stage.to=local"], "Give an absolute path"),
        ([*STAGE, "launcher=kubernetes", "launcher.kubernetes.image=x/y:1"], "belongs to launchers ssh and slurm"),
        ([*STAGE, "launcher=slurm", "restart.elastic=true", "checkpoint.every=5"], "restart.elastic is true"),
        (["launcher.stage.from=src", STAGE[1], "launcher=slurm"], "does not hold the folder that you launch from"),
        ([*STAGE, "launcher=slurm", "script=/etc/passwd"], "would not be run from the copy"),
    ],
)
def test_what_cannot_be_staged_is_refused(
    words: list[str], said: str, dslaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "train.py").touch()
    ran = dslaunch(*WORDS, *words, "--dry-run")
    assert (ran.status, said in ran.err) == (2, True), ran.err


def test_a_dry_run_names_the_steps(
    dslaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    ran = dslaunch(*WORDS, *STAGE, "launcher=ssh", "cluster.hosts=[a,b]", "--dry-run", "--skip-preflight")
    assert ran.status == 0, ran.err
    assert "on 2 hosts; afterwards remove it there" in ran.out
    assert "DSLAUNCH_WORK_DIR=/local/scratch/vla_tiny-" in ran.out
    page = dslaunch("plan", *WORDS, *STAGE).out
    assert "the code of . is copied to /local/scratch on every node" in page
