"""The wheel and the source archive, built for real; the wheel runs where no checkout is in sight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VLA70B = ["recipe=vla70b", "cluster=64xA100"]


def _run(command: Sequence[str | Path], folder: Path) -> str:
    """Standard output of a command that has to succeed, run without Python's variables of this process."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env=environ, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and the wheel that was built from it."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT], folder)
    return folder


@pytest.fixture(scope="module")
def installed(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of a new environment that holds the wheel, and sees this environment's packages without ours.

    Its .pth file names this environment's packages; the .pth files in there, an editable install's among
    them, are not read.
    """
    folder = tmp_path_factory.mktemp("venv with a space")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    Path(packages, "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wheel = next(archives.glob("*.whl"))
    _run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel], folder)
    return folder / "bin"


def _package_data(kind: str) -> set[str]:
    """The files of conf/, recipes/ or templates/ in the checkout, as paths from its root."""
    suffix = ".j2" if kind == "templates" else ".yaml"
    return {str(path.relative_to(ROOT)) for path in (ROOT / kind).rglob(f"*{suffix}")}


def test_wheel_holds_the_package_and_its_data_and_no_tests(archives: Path) -> None:
    names = set(zipfile.ZipFile(next(archives.glob("*.whl"))).namelist())
    for kind in ("conf", "recipes", "templates"):
        wanted = {f"dslaunch/_data/{path}" for path in _package_data(kind)}
        assert wanted
        assert wanted <= names
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "dslaunch").rglob("*.py")}
    assert sources <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"dslaunch"}


def test_source_archive_holds_what_a_developer_needs(archives: Path) -> None:
    with tarfile.open(next(archives.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile"}
    assert wanted | {"tests/real/test_wheel.py"} <= names
    for kind in ("conf", "recipes", "templates"):
        assert _package_data(kind) <= names


def test_installed_wheel_is_what_runs(installed: Path, tmp_path: Path) -> None:
    where = _run([installed / "python", "-c", "import dslaunch; print(dslaunch.__file__)"], tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)


def test_installed_wheel_plans_and_renders(installed: Path, tmp_path: Path) -> None:
    plan = json.loads(_run([installed / "dslaunch", "plan", *VLA70B, "--json"], tmp_path))
    assert plan["schema"] == "dslaunch.plan-json/1"
    assert plan["world_size"] == 64
    out = tmp_path / "it's out"
    _run([installed / "dslaunch", "render", *VLA70B, "-o", out], tmp_path)
    assert {"plan.json", "ds_config.llm.json", "launch.sh", "job.sbatch"} <= {path.name for path in out.iterdir()}
    _run([installed / "dslaunch", "check", out], tmp_path)


def test_installed_wheel_renders_the_same_bytes_as_the_checkout(installed: Path, tmp_path: Path) -> None:
    _run([installed / "dslaunch", "render", *VLA70B, "-o", "wheel"], tmp_path)
    _run([sys.executable, "-m", "dslaunch", "render", *VLA70B, "-o", "checkout"], tmp_path)
    wheel, checkout = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("wheel", "checkout")
    )
    assert wheel == checkout
