"""bash and shellcheck read every rendered script."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.golden.cases import CASES, rendered, written
from tests.real.parts import need

need("shellcheck")

MORE = {
    "blocked": ["recipe=llama3_8b", "cluster=2x8xA100", "engine=deepspeed", "strategy=zero2"],
    "by_node": [
        "recipe=llama3_8b", "cluster=2x8xA100", "engine=deepspeed", "strategy=zero2", "script=t.py",
        "launcher.runner=deepspeed", "launcher.subnet=10.0.0.0/16",
    ],
    "apptainer": [
        "recipe=llama3_8b", "cluster=2x8xA100", "engine=deepspeed", "strategy=zero2", "script=it's.py",
        "launcher.container.kind=apptainer", "launcher.container.image=/a b.sif",
        "launcher.container.mounts=['/data:/data']", "launcher.container.workdir=/w", "launcher.master_port=12345",
        "launcher.python=/opt/my env/bin/python", "launcher.slurm.setup=[ulimit -n 65536]",
    ],
}  # fmt: skip


@pytest.mark.parametrize("words", [*CASES.values(), *MORE.values()], ids=[*CASES, *MORE])
def test_scripts_are_clean(words: list[str], tmp_path: Path) -> None:
    folder = written(tmp_path / "run", rendered(*words))
    for name in ("launch.sh", "rank.sh", "env.sh", "job.sbatch"):
        subprocess.run(["bash", "-n", name], cwd=folder, check=True)
        done = subprocess.run(
            ["shellcheck", "--shell=bash", name], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
