"""What each launcher prepares, and that a dry run shows it and does nothing."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from dslaunch.errors import ConfigError, LaunchError
from dslaunch.launch import LAUNCHERS, How, launch, launch_folder, local, slurm, ssh, torchrun
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.steps import Execute, Follow, Submit
from dslaunch.planfile import Plan
from dslaunch.run.agent import free_port
from dslaunch.run.state import read_state
from tests.launching import HOSTILE, make_files, make_plan, put


def _request(plan: Plan, work_dir: Path, **environ: str) -> LaunchRequest:
    files = make_files(plan, launch_sh="", rank_sh="echo 0 >../ranks/0.exit", job_sbatch="")
    environ = {"PATH": "/usr/bin:/bin", **environ}
    return LaunchRequest(plan, files, work_dir / HOSTILE, work_dir, environ, wait=False)


def test_local_runs_launch_sh_with_a_free_port(tmp_path: Path) -> None:
    (step,) = local.prepare(_request(make_plan(), tmp_path))
    assert isinstance(step, Execute)
    assert step.argv == ("bash", "launch.sh")
    assert step.free_port == "DSLAUNCH_MASTER_PORT"
    assert step.env["DSLAUNCH_RUNNER"] == "deepspeed"
    assert step.env["DSLAUNCH_RUN_DIR"] == str(tmp_path / HOSTILE)
    assert step.env["DSLAUNCH_PYTHON"] == "/usr/bin/python3"
    assert step.ranks == 2


def test_a_free_port_is_given_to_no_connection_before_the_ranks_use_it() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first < 32_000:
        pytest.skip(f"here connections are given ports from {first} on")
    assert max(free_port() for _ in range(100)) < first


def test_the_port_that_a_user_gives_is_kept(tmp_path: Path) -> None:
    (step,) = torchrun.prepare(_request(make_plan(master_port=29511), tmp_path))
    assert isinstance(step, Execute)
    assert (step.free_port, step.env["DSLAUNCH_MASTER_PORT"]) == ("", "29511")
    assert step.env["DSLAUNCH_RUNNER"] == "torchrun"


def test_a_python_path_is_taken_from_where_the_user_stands(tmp_path: Path) -> None:
    variables = _request(make_plan(python="venv/bin/python"), tmp_path).variables(local_python=False)
    assert variables["DSLAUNCH_PYTHON"] == str(tmp_path / "venv/bin/python")


def test_torchrun_on_several_nodes_needs_to_know_which(tmp_path: Path) -> None:
    plan = make_plan(nodes=2, local=False, master_port=29511)
    with pytest.raises(ConfigError, match="DSLAUNCH_NODE_RANK=K"):
        torchrun.prepare(_request(plan, tmp_path, DSLAUNCH_NODE_RANK="2", DSLAUNCH_MASTER_ADDR="a"))
    named = _request(plan, tmp_path, DSLAUNCH_NODE_RANK="1", DSLAUNCH_MASTER_ADDR="a")
    (step,) = torchrun.prepare(named)
    assert isinstance(step, Execute)
    assert (step.env["DSLAUNCH_NODE_RANK"], step.env["DSLAUNCH_MASTER_ADDR"]) == ("1", "a")


def test_ssh_reads_the_users_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    plan = make_plan(nodes=2, local=False, hostfile="hosts")
    (step,) = ssh.prepare(_request(plan, tmp_path))
    assert isinstance(step, Execute)
    assert step.argv[-2:] == ("-m", "dslaunch.launch.remote")
    assert (step.env["DSLAUNCH_HOSTS"], step.env["DSLAUNCH_RUNNER"]) == ("a= b=", "direct")
    (step,) = ssh.prepare(_request(make_plan(nodes=2, local=False, hostfile="hosts", transport="pdsh"), tmp_path))
    assert isinstance(step, Execute)
    assert step.env["DSLAUNCH_HOSTFILE"] == str(tmp_path / HOSTILE / "hosts")
    assert step.argv[-4:] == ("dslaunch.launch.swept", "shielded", "bash", "launch.sh")
    (tmp_path / "hosts").write_text("")
    with pytest.raises(ConfigError, match="hosts: names no host"):
        ssh.prepare(_request(plan, tmp_path))
    (tmp_path / "hosts").unlink()
    with pytest.raises(ConfigError, match=r"launcher\.hostfile: .*No such file"):
        ssh.prepare(_request(plan, tmp_path))


def test_ssh_without_hosts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no host is named"):
        ssh.prepare(_request(make_plan(nodes=2, local=False), tmp_path))


def _with_sbatch(tmp_path: Path) -> str:
    command = tmp_path / "sbatch"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    return f"{tmp_path}:/usr/bin:/bin"


def test_slurm_submits_with_what_is_named_only(tmp_path: Path) -> None:
    plan = make_plan(nodes=8, gpus_per_node=8, local=False, pass_env=("WANDB_API_KEY",))
    request = _request(
        plan, tmp_path, PATH=_with_sbatch(tmp_path), HOME="/h", WANDB_API_KEY="s3cret", SBATCH_PARTITION="x"
    )
    (step,) = slurm.prepare(request)
    assert isinstance(step, Submit)
    assert step.passed == ("HOME", "PATH", "WANDB_API_KEY")
    words = shlex.split(step.describe())
    assert f"DSLAUNCH_RUN_DIR={tmp_path / HOSTILE}" in words
    assert words[words.index("--chdir") + 1] == str(tmp_path / HOSTILE)
    assert words[words.index("--output") + 1].endswith("100%% é/logs/slurm-%j.out")
    assert "s3cret" not in step.describe()
    assert words.index("WANDB_API_KEY=$WANDB_API_KEY") < words.index("sbatch")


def test_slurm_follows_where_the_user_waits(tmp_path: Path) -> None:
    request = _request(make_plan(nodes=8, local=False), tmp_path, PATH=_with_sbatch(tmp_path))
    assert [type(step) for step in slurm.prepare(replace(request, wait=True))] == [Submit, Follow]


def test_an_allocation_runs_the_script_without_the_steps_variables(tmp_path: Path) -> None:
    allocation = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "8", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    (step,) = slurm.prepare(_request(make_plan(nodes=8, local=False), tmp_path, **allocation))
    assert isinstance(step, Execute)
    assert step.argv == ("bash", "job.sbatch")
    assert step.unset == ("SLURM_NTASKS", "SLURM_PROCID")


def test_an_allocation_of_another_size_is_refused(tmp_path: Path) -> None:
    allocation = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "2"}
    with pytest.raises(ConfigError, match="allocation 5 has 2 nodes, the plan 8"):
        slurm.prepare(_request(make_plan(nodes=8, local=False), tmp_path, **allocation))


def test_a_heterogeneous_allocation_has_the_plans_components(tmp_path: Path) -> None:
    plan = make_plan(nodes=3, local=False)
    plan = replace(plan, cluster=replace(plan.cluster, kinds=(1, 2)))
    nodes = {f"SLURM_JOB_NUM_NODES_HET_GROUP_{at}": str(count) for at, count in enumerate((1, 2))}
    allocation = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "1", "SLURM_HET_SIZE": "2", **nodes}
    (step,) = slurm.prepare(_request(plan, tmp_path, SLURM_NTASKS_HET_GROUP_0="2", **allocation))
    assert isinstance(step, Execute)
    assert step.unset == ("SLURM_NTASKS_HET_GROUP_0",)
    with pytest.raises(ConfigError, match=r"has 1 \+ 2 nodes, the plan 3\. "):
        slurm.prepare(_request(make_plan(nodes=3, local=False), tmp_path, **allocation))
    with pytest.raises(ConfigError, match=r"has 3 nodes, the plan 1 \+ 2 in 2 components"):
        slurm.prepare(_request(plan, tmp_path, SLURM_JOB_ID="5", SLURM_JOB_NUM_NODES="3"))


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if name in ("local", "torchrun")])
def test_a_dry_run_prints_the_steps_and_writes_nothing(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    said: list[str] = []
    plan = make_plan(name=launcher, pass_env=("HF_TOKEN",), python="python9")
    files = make_files(plan, launch_sh="exit 1")
    root = tmp_path / "runs"
    assert launch(plan, files, root, How(said.append, dry_run=True)) == 0
    assert [line.split()[0] for line in said] == ["write", "record", "cd"]
    assert "env.sh job.sbatch launch.sh manifest.json plan.json rank.sh" in said[0]
    assert not root.exists()


@pytest.mark.parametrize(("launcher", "last"), [("slurm", "sbatch --parsable"), ("auto", "launcher=slurm")])
def test_a_dry_run_needs_nothing_of_the_cluster(
    launcher: str, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "train.py").write_text("")
    said: list[str] = []
    plan = make_plan(nodes=8, gpus_per_node=8, local=False, name=launcher, pass_env=("HF_TOKEN",))
    files = make_files(plan, job_sbatch="")
    assert launch(plan, files, tmp_path / "runs", How(said.append, wait=True, dry_run=True)) == 0
    assert last in "\n".join(said)
    assert not (tmp_path / "runs").exists()


def test_without_a_launcher_the_files_are_written_and_the_next_command_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "train.py").write_text("")
    plan = make_plan(nodes=8, gpus_per_node=8, local=False)
    files = make_files(plan, job_sbatch="#!/bin/bash\n")
    with pytest.raises(LaunchError, match=r"dslaunch launch .* launcher=slurm") as caught:
        launch(plan, files, tmp_path / "runs", How(lambda _: None))
    assert caught.value.status == 5
    (run,) = (tmp_path / "runs").iterdir()
    assert {name for name in files if (run / name).read_text() == files[name]} == set(files)
    assert read_state(run).status == "prepared"


def test_a_large_launch_asks_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    plan = make_plan(gpus_per_node=65)
    files = make_files(plan, launch_sh="exit 0")
    asked: list[str] = []

    def no(question: str) -> bool:
        asked.append(question)
        return False

    with pytest.raises(LaunchError, match="the answer was no") as caught:
        launch(plan, files, tmp_path / "runs", How(lambda _: None, no))
    assert caught.value.status == 5
    assert asked == ["Launch tiny on 65 GPUs (local)?"]
    assert not (tmp_path / "runs").exists()


def test_a_reviewed_folder_is_copied_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    plan = make_plan()
    folder = put(tmp_path / "reviewed", make_files(plan, launch_sh="echo hello\n"))
    (folder / "notes.txt").write_text("not rendered")
    said: list[str] = []
    runs = tmp_path / "runs"
    assert launch_folder(folder, runs, How(said.append)) == 0
    (run,) = runs.iterdir()
    assert (run / "launch.sh").read_text() == "echo hello\n"
    assert (run / "logs" / "launcher.log").read_text() == "hello\n"
    assert not (run / "notes.txt").exists()


def test_the_launcher_of_a_reviewed_folder_can_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    folder = put(tmp_path / "reviewed", make_files(make_plan(), launch_sh=""))
    said: list[str] = []
    launch_folder(folder, tmp_path, How(said.append, dry_run=True), launcher="torchrun")
    assert "DSLAUNCH_RUNNER=torchrun" in said[-1]
