"""The import layers of pyproject.toml hold, and each contract can be broken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """lint-imports on the package in `folder`, which comes first on its path."""
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def test_layers_hold() -> None:
    done = _lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("errors.py", "import dslaunch.cli", "An import goes only to the right in the flow"),
        ("plan/planner.py", "import omegaconf", "Only compose knows Hydra"),
        ("render/context.py", "import torch", "Only the runtime knows torch, deepspeed and transformers"),
        ("runtime/data.py", "import dslaunch.compose", "The runtime imports planfile and errors alone"),
    ],
)
def test_a_wrong_import_breaks_its_contract(tmp_path: Path, module: str, line: str, contract: str) -> None:
    shutil.copytree(ROOT / "dslaunch", tmp_path / "dslaunch")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "dslaunch" / module).open("a") as stream:
        stream.write(f"\n{line}\n")
    done = _lint(tmp_path)
    assert done.returncode == 1
    assert f"{contract} BROKEN" in done.stdout
