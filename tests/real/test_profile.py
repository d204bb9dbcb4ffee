"""Profiled ranks, as rank.sh of a rendered run folder starts them."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dslaunch.run.state import read_events
from tests.golden.cases import rendered
from tests.launching import HOSTILE
from tests.real.parts import need

need("torch")

PROGRAM = """
import os, sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
second = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(1, 9):
    with torch.profiler.record_function(f"step {number}"):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        second.step()  # another component's, which is not counted beside the first
    if "tell" in sys.argv:
        from dslaunch.progress import step
        step(100 + number)
print(sys.argv[1:], __name__, os.path.basename(sys.path[0]) == os.path.basename(os.path.dirname(__file__)))
sys.exit(7)
"""


def run_rank(
    folder: Path, rank: int, *words: str, kind: str = "torch", path: str = ""
) -> subprocess.CompletedProcess[str]:
    """Rank `rank` of two, to its end."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(PROGRAM)
    cluster = "cluster=local" if kind == "torch" else "cluster=1x2xA100"
    options = [
        "recipe=llama3_8b", cluster, "model=gpt2", "training.seq_len=64", "strategy=ddp", "engine=torch",
        "script=train.py", f"profile={kind}", "profile.ranks=[1]", "profile.first_step=3", "profile.steps=2",
    ]  # fmt: skip
    for name, text in rendered(*options, script_args=list(words)).items():
        (folder / name).write_text(text)
    environ = {name: os.environ[name] for name in ("PATH", "HOME")}
    return subprocess.run(
        ["bash", "rank.sh"], cwd=folder,
        env={
            **environ, "PATH": path + environ["PATH"], "DSLAUNCH_PYTHON": sys.executable,
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
        },
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def steps_of(trace: Path) -> Counter[str]:
    """The steps that a trace holds."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return Counter(each["name"] for each in events if each["name"].startswith("step ") and each["ph"] == "X")


@pytest.mark.parametrize("told", [[], ["tell"]])
def test_the_chosen_steps_of_the_chosen_rank_are_recorded(told: list[str], tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE
    arguments = [*told, "two words", "$x"]
    other = run_rank(folder, 0, *arguments)
    assert not (folder / "profiles").exists()
    chosen = run_rank(folder, 1, *arguments)
    for done in (other, chosen):
        assert done.returncode == 7, done.stderr
        assert f"{arguments} __main__ True" in done.stdout
    assert sorted(path.name for path in (folder / "profiles").iterdir()) == ["rank-1.json.gz", "rank-1.txt"]
    assert steps_of(folder / "profiles" / "rank-1.json.gz") == {"step 3": 1, "step 4": 1}
    assert "aten::addmm" in (folder / "profiles" / "rank-1.txt").read_text()


def test_nsys_is_started_around_the_chosen_rank(tmp_path: Path) -> None:
    """A stand-in for nsys, which no package brings: what it is told."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nsys").write_text('#!/bin/bash\nprintf "%s\\n" "$@" >words\n')
    (tools / "nsys").chmod(0o755)
    folder = tmp_path / HOSTILE
    run_rank(folder, 1, "a", kind="nsys", path=f"{tools}:")
    said = (folder / "words").read_text().splitlines()
    assert said[:6] == [
        "profile", "--output", f"{folder}/profiles/rank-1", "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop", "--force-overwrite=true",
    ]  # fmt: skip
    assert said[9:] == [
        sys.executable, "-u", f"{folder}/profiled.py", "nsys", "torch", "3", "2", f"{folder}/profiles/rank-1",
        "--", "train.py", "a",
    ]  # fmt: skip


def test_without_nsys_the_rank_says_what_is_missing(tmp_path: Path) -> None:
    done = run_rank(tmp_path / "run", 1, kind="nsys")
    assert done.returncode == 2
    assert "rank.sh: profile=nsys: there is no nsys on the PATH of" in done.stderr
    assert "use profile=torch" in done.stderr


_UNEVEN = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model, inputs = torch.nn.Linear(512, 512), torch.randn(256, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for number in range(1, 7):
    for _ in range(40 if dist.get_rank() == 1 else 4):
        model(inputs).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
dist.destroy_process_group()
time.sleep(8)  # the supervisor looks every 5 seconds
"""


@pytest.mark.slow
def test_the_rank_that_the_others_wait_for_is_named(tmp_path: Path) -> None:
    """Two real ranks, of which one has ten times the work of the other."""
    (tmp_path / "uneven.py").write_text(_UNEVEN)
    words = (
        "recipe=vla_tiny", "cluster=local", "launcher=torchrun", "engine=torch", "strategy=ddp", "module=",
        "script=uneven.py", "profile=torch", "profile.ranks=[0,1]", "profile.steps=2", "profile.first_step=3",
        "--skip-preflight", "env.OMP_NUM_THREADS=1",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", "launch", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    shares = [json.loads((run / "profiles" / f"rank-{rank}.share.json").read_text()) for rank in (0, 1)]
    assert shares[0]["communication_share"] > 0.5 > 0.2 > shares[1]["communication_share"], shares
    breaches = [event["details"] for event in read_events(run) if event["kind"] == "breach"]
    found = {each["threshold"]: each["where"] for each in breaches}
    assert (found["straggler"], found["communication_share"]) == ("rank 1", "rank 0")
