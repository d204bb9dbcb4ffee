"""launch.sh under the real launchers, with what breaks careless quoting in every place that takes a text."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.golden.cases import rendered, written
from tests.real.parts import need

need("torch", "deepspeed")

HOSTILE = "it's a $HOME; `echo` \"run\" & 100% \\ é"
ARGUMENTS = [
    "plain", "two words", "", "it's", '"quoted"', "$HOME ${PATH} $(id)", "`id`", "; echo no", "a\nb", "*", "~",
    "\\n \\", "--flag=x y", "é 漢字", "{plan}", "{other}", "-", "!x", "#no",
]  # fmt: skip
PROBE = """
import json, os, pathlib, sys
kept = {n: v for n, v in os.environ.items() if n.startswith("DSLAUNCH") or n in (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NOTE", "SECRET")}
out = pathlib.Path(os.environ["DSLAUNCH_RUN_DIR"]) / f"probe-{os.environ['RANK']}.json"
out.write_text(json.dumps({"argv": sys.argv, "env": kept, "cwd": os.getcwd()}))
"""
SAVE_AND_STOP = """
import os, pathlib, signal, sys, time
run = pathlib.Path(os.environ["DSLAUNCH_RUN_DIR"])
def save(*_):
    time.sleep(1)
    (run / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
(run / "ready").touch()
time.sleep(300)
"""


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    """Where the user stands; the script is named as seen from there."""
    folder = tmp_path / ("work " + HOSTILE)
    folder.mkdir()
    (folder / "pro be's.py").write_text(PROBE)
    return folder


def launch(run_dir: Path, work_dir: Path, runner: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`bash launch.sh`, typed in `work_dir`."""
    variables = {"DSLAUNCH_RUNNER": runner, "DSLAUNCH_PYTHON": sys.executable, **env}
    return subprocess.run(
        ["bash", str(run_dir / "launch.sh")], cwd=work_dir, env={**os.environ, **variables},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def files_for(script: str, *words: str) -> dict[str, str]:
    return rendered(
        "recipe=vla_tiny", "cluster=local", "launcher.pass_env=[SECRET]", *words,
        script=script, module="", script_args=ARGUMENTS, env={"NOTE": HOSTILE},
    )  # fmt: skip


@pytest.mark.parametrize("runner", ["deepspeed", "torchrun"])
def test_everything_arrives_unchanged_on_every_rank(runner: str, tmp_path: Path, work_dir: Path) -> None:
    run_dir = written(tmp_path / HOSTILE, files_for("pro be's.py"))
    done = launch(run_dir, work_dir, runner, SECRET=HOSTILE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    plan = str(run_dir / "plan.json")
    expected = ["pro be's.py", *(plan if word == "{plan}" else word for word in ARGUMENTS)]
    ports = set()
    for rank in range(2):
        seen = json.loads((run_dir / f"probe-{rank}.json").read_text())
        env = seen["env"]
        assert seen["argv"] == expected
        assert seen["cwd"] == env["DSLAUNCH_WORK_DIR"] == str(work_dir)
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert env["NOTE"] == env["SECRET"] == HOSTILE
        assert env["DSLAUNCH_PLAN"] == plan
        assert env["DSLAUNCH_DS_CONFIG"] == str(run_dir / "ds_config.json")
        assert (run_dir / "ranks" / f"{rank}.exit").read_text() == "0\n"
        ports.add(env["MASTER_PORT"])
    assert len(ports) == 1


@pytest.mark.parametrize("runner", ["deepspeed", "torchrun"])
def test_a_failing_rank_fails_the_launch_and_leaves_its_status(
    runner: str, tmp_path: Path, work_dir: Path
) -> None:
    (work_dir / "fail.py").write_text("import os, sys; sys.exit(7 if os.environ['RANK'] == '1' else 0)")
    run_dir = written(tmp_path / "run", files_for("fail.py"))
    assert launch(run_dir, work_dir, runner, SECRET="x").returncode != 0
    assert (run_dir / "ranks" / "1.exit").read_text() == "7\n"


def test_a_rank_told_to_stop_may_finish_its_work_first(tmp_path: Path, work_dir: Path) -> None:
    (work_dir / "save.py").write_text(SAVE_AND_STOP)
    run_dir = written(tmp_path / "run", files_for("save.py"))
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "SECRET": "x", "DSLAUNCH_PYTHON": sys.executable}
    rank = subprocess.Popen(
        ["bash", str(run_dir / "rank.sh")], cwd=work_dir, env=env, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not (run_dir / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(rank.pid, signal.SIGTERM)
    assert rank.wait(timeout=60) == 0
    assert (run_dir / "saved").exists()
    assert (run_dir / "ranks" / "0.exit").read_text() == "0\n"


@pytest.mark.parametrize(
    ("env", "words", "message"),
    [
        ({"DSLAUNCH_RUNNER": "mpirun"}, [], "DSLAUNCH_RUNNER is 'mpirun'; allowed are deepspeed and torchrun"),
        ({"DSLAUNCH_PYTHON": "/no/python"}, [], "launcher.python: '/no/python' is not found"),
        ({"SECRET": ""}, [], "SECRET: is named in launcher.pass_env"),
    ],
)
def test_a_launch_that_cannot_start_says_why(
    env: dict[str, str], words: list[str], message: str, tmp_path: Path, work_dir: Path
) -> None:
    run_dir = written(tmp_path / "run", files_for("x.py", *words))
    done = launch(run_dir, work_dir, **{"runner": "deepspeed", "SECRET": "x", **lowered(env)})
    assert done.returncode != 0
    assert message in done.stderr


def lowered(env: dict[str, str]) -> dict[str, str]:
    """DSLAUNCH_RUNNER is the parameter `runner` of `launch`."""
    return {"runner" if name == "DSLAUNCH_RUNNER" else name: value for name, value in env.items()}


def test_several_nodes_need_their_hosts(tmp_path: Path, work_dir: Path) -> None:
    files = rendered("recipe=llama3_8b", "cluster=2x8xA100", "engine=deepspeed", "strategy=zero2", "script=t.py")
    run_dir = written(tmp_path / "run", files)
    done = launch(run_dir, work_dir, "deepspeed")
    assert done.returncode == 2
    assert "is missing or empty. Set cluster.hosts, launcher.hostfile=FILE or DSLAUNCH_HOSTFILE" in done.stderr
    done = launch(run_dir, work_dir, "torchrun")
    assert done.returncode == 2
    assert "DSLAUNCH_NODE_RANK" in done.stderr


def test_paths_that_the_runner_cannot_carry_to_other_hosts_are_refused(tmp_path: Path, work_dir: Path) -> None:
    words = ["recipe=llama3_8b", "cluster=2x8xA100", "engine=deepspeed", "strategy=zero2", "script=t.py"]
    run_dir = written(tmp_path / "run", rendered(*words, "cluster.hosts=[a,b]"))
    done = launch(run_dir, work_dir, "deepspeed")
    assert done.returncode == 2
    assert "cannot carry" in done.stderr


@pytest.mark.parametrize(
    ("visible", "message"),
    [("0,1", "names 2 GPUs (0,1), the plan needs 8"), ("a,b,c,d,e,f,g,h", "takes numbers only")],
)
def test_gpus_that_the_runner_would_not_take_are_refused(
    visible: str, message: str, tmp_path: Path, work_dir: Path
) -> None:
    words = ["recipe=llama3_8b", "cluster=8xA100", "engine=deepspeed", "strategy=zero2", "script=t.py"]
    run_dir = written(tmp_path / "run", rendered(*words))
    done = launch(run_dir, work_dir, "deepspeed", CUDA_VISIBLE_DEVICES=visible)
    assert done.returncode == 2
    assert message in done.stderr


def test_ranks_started_in_the_wrong_number_stop(tmp_path: Path, work_dir: Path) -> None:
    run_dir = written(tmp_path / "run", files_for("x.py"))
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "3", "SECRET": "x"}
    done = subprocess.run(
        ["bash", str(run_dir / "rank.sh")], cwd=work_dir, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "WORLD_SIZE is 3, the plan has 2 ranks" in done.stderr


def test_megatrons_arguments_reach_its_script(tmp_path: Path, work_dir: Path) -> None:
    checkout = work_dir / "Megatron-LM"
    checkout.mkdir()
    (checkout / "pretrain_gpt.py").write_text(PROBE)
    files = rendered(
        "recipe=llama3_8b", "cluster=8xA100", "strategy=zero1", "data.tokenizer=/tok k",
        "data.path=0.5 '/da ta/a' 0.5 /data/b",
        engine={"name": "megatron", "path": "Megatron-LM", "extra": {"wandb-project": "$HOME; it's"}},
    )  # fmt: skip
    run_dir = written(tmp_path / HOSTILE, files)
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "8", "DSLAUNCH_PYTHON": sys.executable}
    subprocess.run(["bash", str(run_dir / "rank.sh")], cwd=work_dir, env=env, check=True)
    argv = json.loads((run_dir / "probe-0.json").read_text())["argv"]
    assert argv[0] == "Megatron-LM/pretrain_gpt.py"
    assert argv[argv.index("--save") + 1] == f"{run_dir}/checkpoints"
    assert argv[argv.index("--wandb-project") + 1] == "$HOME; it's"
    assert argv[argv.index("--tokenizer-model") + 1] == "/tok k"
    at = argv.index("--data-path")
    assert argv[at + 1 : at + 5] == ["0.5", "/da ta/a", "0.5", "/data/b"]
