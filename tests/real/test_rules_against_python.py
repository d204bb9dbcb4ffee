"""Rules about what a script takes from the files beside it, against Python: the script of each case is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases.load import Case, all_cases

RAISED = {
    "script.import": ("ImportError", "AttributeError"),
    "script.signature": ("TypeError",),
    "script.config-key": ("KeyError",),
    "script.batch-key": ("KeyError", "ValueError"),
    "script.forward-tuple": ("TypeError", "AttributeError"),
    "script.shadowed-module": ("ImportError", "AttributeError"),
}
NEEDS_TORCH = ("script.batch-key", "script.forward-tuple", "script.shadowed-module")
STUB = """
class nn:
    class Module:
        def __init__(self):
            pass

    class Linear:
        def __init__(self, *given, **more):
            pass
"""
"""In the place of torch, which takes seconds, where only Python is asked."""
FAILING = [case for case in all_cases() if case.rule in RAISED and case.rule in {rule for rule, _ in case.expect}
           and case.real != "unjudged"]  # fmt: skip


@pytest.mark.parametrize("case", FAILING, ids=lambda case: f"{case.rule}: {case.name}")
def test_python_raises_what_is_told(case: Case, tmp_path: Path) -> None:
    if case.rule in NEEDS_TORCH:
        pytest.importorskip("torch")
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    if case.rule not in NEEDS_TORCH:
        (stubs / "torch.py").write_text(STUB)
    for name, text in case.files.items():
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    script = next(name for name in case.files if name in ("train.py", "deepspeed.py"))
    line = re.search(rf"{script} (.+)", case.files.get("train.sh", ""))
    arguments = line[1].split() if line else []
    ran = subprocess.run(
        [sys.executable, "-B", script, *arguments],
        cwd=tmp_path / "run",
        env={**os.environ, "PYTHONPATH": str(stubs)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 1, ran.stdout
    assert ran.stderr.strip().splitlines()[-1].startswith(RAISED[case.rule]), ran.stderr
