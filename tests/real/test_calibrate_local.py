"""`dslaunch calibrate` on a run that really ran."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.real.parts import need


def test_a_run_on_this_machines_cpus_teaches_nothing_and_says_so(tmp_path: Path) -> None:
    need("torch")
    words = ["recipe=vla_tiny", "cluster=local", "strategy=ddp", "training.steps=21", "-y"]
    ran = _dslaunch(tmp_path, *words)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (run,) = (tmp_path / "runs").iterdir()
    (tmp_path / "site").mkdir()
    taught = _dslaunch(tmp_path, "calibrate", str(run), "--config-dir", "site")
    assert taught.returncode == 2
    assert f"{run}: teaches nothing: ran on CPUs" in taught.stderr
    assert list((tmp_path / "site").iterdir()) == []


def _dslaunch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dslaunch", *words], cwd=folder, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
