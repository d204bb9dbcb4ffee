"""The accelerate files that the import tests use are files that accelerate itself reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.parts import need

need("torch")
need("accelerate")

from accelerate.commands.config.config_args import load_config_from_file  # noqa: E402

FOLDER = Path(__file__).parents[1] / "unit" / "imports"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("accelerate_*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_it(path: Path) -> None:
    read = load_config_from_file(str(path))
    assert read.num_processes > 0
    assert read.distributed_type in {"DEEPSPEED", "FSDP", "MULTI_GPU"}
