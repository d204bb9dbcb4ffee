"""launch.sh, rank.sh, job.sbatch, env.sh, hostfile and ds_env: what stands in them, and what is refused."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from dslaunch.errors import ConfigError
from tests.golden.cases import rendered

TINY = ["recipe=vla_tiny", "cluster=local"]
LLAMA = ["recipe=llama3_8b", "cluster=2x8xA100", "engine=deepspeed", "strategy=zero2"]


def directives(*words: str, **changes: Any) -> list[str]:
    text = rendered(*LLAMA, "script=train.py", *words, **changes)["job.sbatch"]
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_without_a_program_every_script_stops_and_names_the_key() -> None:
    files = rendered(*LLAMA)
    for name in ("launch.sh", "job.sbatch", "rank.sh"):
        assert "Add script=PATH" in files[name]
        assert "exec" not in files[name]


def test_empty_slurm_settings_are_left_to_the_site() -> None:
    assert directives() == [
        "--job-name=llama3_8b", "--output=slurm-%j.out", "--nodes=2", "--ntasks-per-node=8",
        "--cpus-per-task=16", "--open-mode=append", "--no-requeue", "--gres=gpu:8", "--exclusive",
    ]  # fmt: skip


def test_slurm_settings_reach_their_directives() -> None:
    made = directives(
        "launcher.slurm.partition=gpu", "launcher.slurm.qos=high", "launcher.slurm.constraint=a100&ib",
        "launcher.slurm.reservation=r1", "launcher.slurm.switches=1@00:30:00", "launcher.slurm.mem=0",
        "launcher.slurm.comment=two words", "launcher.slurm.time=12:00:00", "launcher.slurm.cpus_per_task=4",
        "launcher.slurm.exclusive=false", "launcher.slurm.signal_before_s=120",
        "launcher.slurm.sbatch_extra=['--mail-type=END']",
    )  # fmt: skip
    expected = {
        "--partition=gpu", "--qos=high", "--constraint=a100&ib", "--reservation=r1", "--switches=1@00:30:00",
        "--mem=0", '--comment="two words"', "--time=12:00:00", "--signal=TERM@120", "--cpus-per-task=4",
        "--mail-type=END",
    }  # fmt: skip
    assert expected <= set(made)
    assert "--exclusive" not in made


@pytest.mark.parametrize(
    ("slurm", "message"),
    [
        ({"sbatch_extra": ["mail-type=END"]}, "is no option"),
        ({"sbatch_extra": ["--a\n#SBATCH --b"]}, "not one line"),
        ({"partition": "gpu\n#SBATCH --x"}, "launcher.slurm.partition"),
        ({"comment": 'a "b"'}, "does not survive"),
        ({"modules": ["a\nb"]}, "launcher.slurm.modules"),
        ({"account": "a b"}, "launcher.slurm.account"),
        ({"constraint": "a b"}, "launcher.slurm.constraint"),
        ({"time": "noon"}, "D-HH:MM:SS"),
        ({"time": "1:2:3:4"}, "D-HH:MM:SS"),
        ({"time": "12h"}, "D-HH:MM:SS"),
        ({"switches": "one"}, "1@00:30:00"),
        ({"exclude": "n[1-2"}, "bracket"),
        ({"exclude": "n1]["}, "bracket"),
        ({"mem": "lots"}, "launcher.slurm.mem"),
        ({"sbatch_extra": ["-N 3"]}, "is no option"),
        ({"sbatch_extra": ["--nodes=3"]}, "--nodes is decided by the plan"),
        ({"sbatch_extra": ["--ntasks-per-node 3"]}, "--ntasks-per-node is decided"),
        ({"sbatch_extra": ["--gpus-per-node=3"]}, "--gpus-per-node is decided"),
        ({"sbatch_extra": ["--exclusive"]}, "--exclusive is decided"),
        ({"cpus_per_task": 17}, "17 x 8 ranks = 136 cores, and a node has 128. Give at most 16"),
    ],
)
def test_what_would_break_its_line_is_refused(slurm: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        directives(launcher={"name": "slurm", "slurm": slurm})
    assert message in str(caught.value)


def test_apptainer_wraps_the_rank_and_binds_its_folders() -> None:
    text = rendered(
        *LLAMA, "script=train.py", "launcher.container.kind=apptainer", "launcher.container.image=/img/a b.sif",
        "launcher.container.mounts=[/data:/data]", "launcher.container.workdir=/work dir",
    )["job.sbatch"]  # fmt: skip
    line = next(line for line in text.splitlines() if "apptainer exec" in line)
    assert "exec --nv --bind \"$DSLAUNCH_RUN_DIR\":\"$DSLAUNCH_RUN_DIR\" --bind /data:/data" in line
    assert "--pwd '/work dir' '/img/a b.sif' bash \"$DSLAUNCH_RUN_DIR/rank.sh\" slurm" in line
    assert "export DSLAUNCH_WORK_DIR='/work dir'" in text


@pytest.mark.parametrize(
    ("container", "message"),
    [
        ({"kind": "pyxis"}, "launcher.container.image is empty"),
        ({"kind": "pyxis", "image": "x", "mounts": ["/data"]}, "HOST:CONTAINER"),
        ({"image": "x"}, "image is given, but kind is none"),
        ({"kind": "none", "mounts": ["/a:/a"]}, "mounts is given, but kind is none"),
    ],
)
def test_a_container_that_cannot_start_is_refused(container: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        directives(launcher={"name": "slurm", "container": container})
    assert message in str(caught.value)


def test_environment_values_are_quoted_sorted_and_win_over_ours() -> None:
    text = rendered(*TINY, env={"Z": "a b", "A": "x=$(y)", "OMP_NUM_THREADS": "3"})["env.sh"]
    exports = [line for line in text.splitlines() if line.startswith("export")]
    assert exports == [
        "export A='x=$(y)'", "export DEEPSPEED_TIMEOUT=30", "export DS_ACCELERATOR=cpu",
        "export OMP_NUM_THREADS=3", "export Z='a b'",
    ]  # fmt: skip


def test_passed_variables_stand_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    files = rendered(*TINY, "launcher.pass_env=[HF_TOKEN]")
    assert "${HF_TOKEN:?" in files["env.sh"]
    assert not [name for name, text in files.items() if "hf_secret_value" in text]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": {"1A": "x"}}, "env.1A"),
        ({"env": {"A-B": "x"}}, "Allowed are letters"),
        ({"env": {"A": "x\0y"}}, "NUL"),
        ({"launcher": {"pass_env": ["A B"]}}, "launcher.pass_env"),
        ({"env": {"WORLD_SIZE": "9"}}, "env.WORLD_SIZE: the launcher sets WORLD_SIZE for each rank"),
        ({"env": {"RANK": "3"}}, "env.RANK"),
        ({"env": {"LOCAL_RANK": "0"}}, "env.LOCAL_RANK"),
        ({"env": {"MASTER_ADDR": "h"}}, "env.MASTER_ADDR"),
        ({"env": {"MASTER_PORT": "1"}}, "Set launcher.master_port"),
        ({"env": {"SLURM_PROCID": "0"}}, "env.SLURM_PROCID"),
        ({"env": {"DSLAUNCH_RUN_DIR": "/x"}}, "env.DSLAUNCH_RUN_DIR"),
        ({"env": {"TORCHELASTIC_RUN_ID": "x"}}, "env.TORCHELASTIC_RUN_ID"),
    ],
)
def test_an_environment_that_no_shell_takes_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rendered(*TINY, **changes)
    assert message in str(caught.value)


def test_only_what_deepspeeds_runner_carries_is_in_its_file() -> None:
    env = {"PLAIN": "a,b:c", "SPACED": "a b", "NONE": ""}
    env |= {"PERCENT": "%h", "QUOTE": 'a"b', "LINES": "a\nb", "EDGE": " a"}
    files = rendered(*LLAMA, "script=t.py", "cluster.hosts=[a,b]", env=env)
    names = [line.partition("=")[0] for line in files["ds_env"].splitlines()]
    assert names == ["DEEPSPEED_TIMEOUT", "NONE", "OMP_NUM_THREADS", "PLAIN", "SPACED"]
    for name in env:
        assert f"export {name}=" in files["env.sh"]


def test_hosts_are_written_in_rank_order_and_only_where_known() -> None:
    files = rendered(*LLAMA, "script=t.py", "cluster.hosts=[z,a]")
    assert files["hostfile"] == "z slots=8\na slots=8\n"
    assert rendered(*TINY)["hostfile"] == "localhost slots=2\n"
    assert "hostfile" not in rendered(*LLAMA, "script=t.py")
    assert "hostfile" not in rendered(*LLAMA, "script=t.py", "launcher.hostfile=/etc/hf")
    with pytest.raises(ConfigError, match="stands twice"):
        rendered(*LLAMA, "script=t.py", "cluster.hosts=[a,a]")


def test_arguments_are_kept_and_only_the_four_placeholders_become_paths() -> None:
    arguments = ["--c={ds_config}", "{plan}", "{run_dir}/x y", "{checkpoint_dir}", "{other}", "{}", "", "$HOME;'"]
    text = rendered(*LLAMA, script="a b.py", script_args=arguments)["rank.sh"]
    line = next(line for line in text.splitlines() if '"$DSLAUNCH_PYTHON" -u' in line)
    words = shlex.split(line.removesuffix("|| status=$?"))
    assert words == [
        "exec", "$DSLAUNCH_PYTHON", "-u", "a b.py", "--c=$DSLAUNCH_RUN_DIR/ds_config.json",
        "$DSLAUNCH_RUN_DIR/plan.json", "$DSLAUNCH_RUN_DIR/x y", "$DSLAUNCH_RUN_DIR/checkpoints",
        "{other}", "{}", "", "$HOME;'",
    ]  # fmt: skip


def test_a_configuration_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no single DeepSpeed configuration"):
        rendered("recipe=vla70b", "cluster=64xA100", script="t.py", script_args=["{ds_config}"])


def test_a_given_checkpoint_folder_is_kept_as_given() -> None:
    text = rendered(*LLAMA, "checkpoint.dir=/big disk/c", script="t.py", script_args=["{checkpoint_dir}"])
    assert "'/big disk/c'" in text["rank.sh"]


def test_the_environment_keeps_what_is_the_users_affair() -> None:
    env = {"PATH": "/opt/bin", "LD_PRELOAD": "x.so", "RANKS": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    text = rendered(*LLAMA, "script=t.py", env=env)["env.sh"]
    assert all(f"export {name}={value}" in text for name, value in env.items())


def test_fewer_visible_gpus_than_planned_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.CUDA_VISIBLE_DEVICES: names 2 GPUs, the plan uses 8"):
        rendered(*LLAMA, "script=t.py", env={"CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.parametrize("limit", ["90", "90:30", "12:00:00", "2-0", "2-00:00", "2-00:00:00", "UNLIMITED"])
def test_each_of_slurms_time_formats_is_taken(limit: str) -> None:
    assert f"--time={limit}" in directives(launcher={"slurm": {"time": limit}})


def test_sbatch_options_that_only_look_like_the_plans_are_taken() -> None:
    extra = ["--gres-flags=enforce-binding", "--nodelist=n1", "--gpu-bind=none", "--nice 7"]
    assert set(extra) <= set(directives(launcher={"slurm": {"sbatch_extra": extra}}))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ({"module": "a b"}, "module: 'a b' is no module's name"),
        ({"module": "a..b"}, "no module's name"),
        ({"module": "-c"}, "no module's name"),
        ({"module": "a.b", "script": "t.py"}, "are both given"),
    ],
)
def test_a_program_that_cannot_run_is_refused(program: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rendered(*LLAMA, **program)


def test_a_timeout_of_more_than_a_week_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"launcher\.timeout_minutes.*10080"):
        rendered(*LLAMA, "launcher.timeout_minutes=10081")


def test_amds_gpus_are_asked_for_and_chosen_by_their_own_names() -> None:
    words = ["recipe=llama3_8b", "engine=deepspeed", "strategy=zero3_cpu_offload", "script=t.py"]
    container = ["launcher.container.kind=apptainer", "launcher.container.image=x.sif"]
    files = rendered(*words, *container, "cluster=8xMI300X", "training.overlap_comm=true")
    assert "#SBATCH --gres=gpu:8\n" in files["job.sbatch"]
    assert "apptainer exec --rocm --bind" in files["job.sbatch"]
    assert "HIP_VISIBLE_DEVICES names ${#visible[@]} GPUs" in files["launch.sh"]
    assert 'unset HIP_VISIBLE_DEVICES\n      export CUDA_VISIBLE_DEVICES="$chosen"' in files["launch.sh"]
    zero = json.loads(files["ds_config.json"])["zero_optimization"]
    assert zero["overlap_comm"] is True
    assert zero["offload_optimizer"]["pin_memory"] is True
    nvidia = rendered(*words, *container, "cluster=8xA100")
    assert "--nv" in nvidia["job.sbatch"]
    assert "HIP_" not in nvidia["launch.sh"]
