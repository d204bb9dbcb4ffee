"""What tests on real parts need, and what happens where it is missing."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

_PARTS = {
    "torch": ("module", "torch"),
    "deepspeed": ("module", "deepspeed"),
    "transformers": ("module", "transformers"),
    "accelerate": ("module", "accelerate"),
    "peft": ("module", "peft"),
    "megatron": ("module", "megatron.core"),
    "sarif": ("module", "pydantic_sarif"),
    "sklearn": ("module", "sklearn"),
    "datasets": ("module", "datasets"),
    "webdataset": ("module", "webdataset"),
    "kubernetes_validate": ("module", "kubernetes_validate"),
    "mkdocs": ("module", "material"),
    "vl_convert": ("module", "vl_convert"),
    "playwright": ("module", "playwright"),
    "chromium": ("command", "chromium"),
    "slurm": ("command", "slurmctld"),
    "sshd": ("command", "sshd"),
    "pdsh": ("command", "pdsh"),
    "openmpi": ("command", "mpirun"),
    "shellcheck": ("command", "shellcheck"),
    "curl": ("command", "curl"),
    "jq": ("command", "jq"),
}


def _present(part: str) -> bool:
    kind, name = _PARTS[part]
    if kind == "command":
        return shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") is not None
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def need(*parts: str) -> None:
    """Skip the calling module or test where a part is missing; fail where DSLAUNCH_REQUIRE names the part."""
    required = os.environ.get("DSLAUNCH_REQUIRE", "").split(",")
    for part in parts:
        if _present(part):
            continue
        if part in required:
            pytest.fail(f"DSLAUNCH_REQUIRE names {part}, but it is not installed", pytrace=False)
        pytest.skip(f"{part} is not installed", allow_module_level=True)
