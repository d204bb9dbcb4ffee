"""Variables by fabric: which a cluster gets, where they show, and whose value wins."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from dslaunch.paths import data_root
from dslaunch.rules.launchers.environment import _KNOWN
from tests.command import CommandLine
from tests.golden.cases import rendered

CALLED_FOR = {
    "cluster=16xH100": {"NCCL_IB_TIMEOUT": "22"},
    "cluster=8xH100": {},
    "cluster=64xA100-80GB-RoCE": {"NCCL_IB_TIMEOUT": "22"},
    "cluster=128xA100-80GB-RoCE": {"NCCL_IB_TIMEOUT": "22", "NCCL_IB_QPS_PER_CONNECTION": "4"},
    "cluster=128xA100-80GB-RoCE cluster.fabric=none": {},
    "cluster=16xA100 cluster.network.kind=efa": {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0"},
    "cluster=16xA100 cluster.fabric=efa": {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0"},
    "cluster=16xA100 cluster.network.kind=ethernet cluster.network.gb_per_s=12.5": {
        "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4",
    },
    "cluster=16xA100 cluster.network.kind=ethernet cluster.network.gb_per_s=12.4": {"NCCL_IB_DISABLE": "1"},
    "cluster=8xGB200-NVL72": {
        "NCCL_IB_TIMEOUT": "22", "NCCL_CUMEM_ENABLE": "1", "NCCL_MNNVL_ENABLE": "1",
    },
    "cluster=16xH100 env.NCCL_IB_TIMEOUT=19": {},
}  # fmt: skip


@pytest.mark.parametrize("words", CALLED_FOR)
def test_a_plan_names_what_its_fabric_calls_for_with_reason_and_source(words: str) -> None:
    files = rendered("recipe=llama3_8b", "script=train.py", *words.split())
    found = json.loads(files["plan.json"])["fabric"]
    assert {each["name"]: each["value"] for each in found} == CALLED_FOR[words]
    assert all(each["reason"] and each["source"] for each in found)
    assert all(each["reason"] in files["env.sh"] for each in found)


@pytest.mark.parametrize(("own", "wins"), [(None, "22"), ("14", "14"), ("", "")])
def test_what_the_environment_of_a_host_says_wins(own: str | None, wins: str, tmp_path: Path) -> None:
    files = rendered("recipe=llama3_8b", "cluster=16xH100", "script=train.py", "cluster.hosts=[a,b]")
    (tmp_path / "env.sh").write_text(files["env.sh"])
    before = {} if own is None else {"NCCL_IB_TIMEOUT": own}
    script = "set -euo pipefail; source ./env.sh; printenv NCCL_IB_TIMEOUT"
    said = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", **before},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout == f"{wins}\n"
    assert (
        "NCCL_IB_TIMEOUT" not in files["ds_env"]
    )  # the runner would export it before the host's own is seen
    assert json.loads(files["preflight.json"])["env_defaults"] == {"NCCL_IB_TIMEOUT": "22"}


def test_what_env_says_wins() -> None:
    files = rendered("recipe=llama3_8b", "cluster=16xH100", "script=train.py", "env.NCCL_IB_TIMEOUT=19")
    assert "\nexport NCCL_IB_TIMEOUT=19\n" in files["env.sh"]


def test_the_plan_shows_them(dslaunch: CommandLine) -> None:
    said = dslaunch("plan", "recipe=llama3_8b", "cluster=128xA100-80GB-RoCE", "script=train.py")
    assert "for roce: NCCL_IB_QPS_PER_CONNECTION=4 NCCL_IB_TIMEOUT=22\n" in said.out


def test_a_ranks_threads_are_its_cores() -> None:
    words = ["recipe=llama3_8b", "cluster=16xH100", "script=train.py", "launcher.slurm.cpus_per_task=3"]
    assert "\nexport OMP_NUM_THREADS=3\n" in rendered(*words)["env.sh"]
    assert "\nexport OMP_NUM_THREADS=3\n" not in rendered(*words, "launcher=ssh", "cluster.hosts=[a,b]")["env.sh"]
    assert "\nexport OMP_NUM_THREADS=1\n" in rendered(*words, "env.OMP_NUM_THREADS=1")["env.sh"]


def test_the_plan_names_what_ranks_get_beside_them(dslaunch: CommandLine) -> None:
    words = ["recipe=vla70b", "cluster=64xA100", "env.B=secret-looking", "env.A=1"]
    ran = dslaunch("plan", *words, "launcher.pass_env=[TOKEN,KEY]")
    assert ran.status == 0, ran.err
    assert "\nenvironment of every rank: A, B\n" in ran.out
    assert "\nhanded over from the launching shell, by name: TOKEN, KEY\n" in ran.out
    assert "secret-looking" not in ran.out


def test_a_site_has_its_own(dslaunch: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "conf" / "fabric"
    folder.mkdir(parents=True)
    cluster = "cluster=16xA100-80GB-RoCE"
    words = ["plan", "recipe=llama3_8b", cluster, "script=train.py", "--config-dir", str(tmp_path)]
    (folder / "roce.yaml").write_text("NCCL_IB_TC: {value: '106', reason: lossless, source: our switches}\n")
    assert "for roce: NCCL_IB_TC=106\n" in dslaunch(*words).out
    (folder / "roce.yaml").write_text("NCCL_IB_TC:\n  value: '1 06'\n  reason: a\n  source: b\n")
    refused = dslaunch(*words)
    assert refused.status == 2
    assert f"{folder}/roce.yaml:2: fabrics.roce.NCCL_IB_TC.value" in refused.err


def test_an_unknown_fabric_is_refused_with_those_there_are(dslaunch: CommandLine) -> None:
    said = dslaunch("plan", "recipe=llama3_8b", "cluster=16xH100", "script=t.py", "cluster.fabric=eaf")
    assert said.status == 2
    assert "Allowed are auto, none, efa, ethernet, infiniband, mnnvl, roce. Did you mean 'efa'?" in said.err


def test_fabrics_are_read_from_their_folder_alone(dslaunch: CommandLine) -> None:
    said = dslaunch(
        "plan", "recipe=llama3_8b", "cluster=16xH100", "fabrics.infiniband.NCCL_IB_TIMEOUT.value=1"
    )
    assert said.status == 2
    assert "Set env.NAME=VALUE for one run" in said.err


@pytest.mark.parametrize(
    "file", sorted((data_root() / "conf" / "fabric").glob("*.yaml")), ids=lambda f: f.stem
)
def test_a_shipped_nccl_variable_is_one_that_nccl_knows(file: Path) -> None:
    named = [name for name in yaml.safe_load(file.read_text()) if name.startswith("NCCL_")]
    assert set(named) <= _KNOWN
