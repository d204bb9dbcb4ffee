"""kubernetes.yaml against the published schemas of PyTorchJob and JobSet, and what its pods start.

tests/data/kubernetes_schemas.json holds the parts of the two CustomResourceDefinitions that a rendering may use
(kubeflow/training-operator v1.9.0 and kubernetes-sigs/jobset v0.9.1, both Apache-2.0), without their descriptions.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dslaunch.errors import ConfigError
from tests.golden.cases import rendered

SCHEMAS = json.loads((Path(__file__).parents[1] / "data" / "kubernetes_schemas.json").read_text())
WORDS = ["recipe=vla_tiny", "cluster=2x2xA100", "script=train.py", "module=", "launcher=kubernetes"]
FULL = [
    "launcher.kubernetes.image=registry/train:1",
    "launcher.kubernetes.namespace=vla",
    "launcher.kubernetes.volume_claim=scratch",
    "launcher.kubernetes.secret=tokens",
    "launcher.kubernetes.queue=gpus",
    "launcher.kubernetes.service_account=trainer",
    "launcher.kubernetes.node_selector={gpu: a100}",
    "launcher.kubernetes.resources={cpu: '96', memory: 1000Gi, rdma/hca: '8'}",
    "launcher.pass_env=[WANDB_API_KEY]",
]


def _job(*words: str) -> dict[str, Any]:
    _, job = yaml.safe_load_all(rendered(*WORDS, *words)["kubernetes.yaml"])
    return dict(job)


def _pods(job: dict[str, Any]) -> list[dict[str, Any]]:
    if job["kind"] == "JobSet":
        return [each["template"]["spec"]["template"]["spec"] for each in job["spec"]["replicatedJobs"]]
    return [each["template"]["spec"] for each in job["spec"]["pytorchReplicaSpecs"].values()]


@pytest.mark.parametrize("words", [FULL[:1], FULL], ids=["least", "full"])
@pytest.mark.parametrize("kind", ["pytorchjob", "jobset"])
def test_the_job_is_what_its_published_schema_takes(kind: str, words: list[str]) -> None:
    job = _job(*words, f"launcher.kubernetes.kind={kind}")
    assert (job["apiVersion"], job["kind"]) == tuple(SCHEMAS[kind]["names"])
    jsonschema.validate(job, SCHEMAS[kind]["schema"])
    broken = json.loads(json.dumps(job).replace('"containers"', '"container"'))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMAS[kind]["schema"])


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset"])
def test_a_pod_is_a_node_with_all_its_gpus(kind: str) -> None:
    job = _job(*FULL, f"launcher.kubernetes.kind={kind}")
    assert job["metadata"] == {
        "name": "vla-tiny", "namespace": "vla", "labels": {"kueue.x-k8s.io/queue-name": "gpus"}
    }  # fmt: skip
    spec = job["spec"]
    if kind == "jobset":
        (only,) = spec["replicatedJobs"]
        assert only["template"]["spec"]["completions"] == only["template"]["spec"]["parallelism"] == 2
    else:
        assert {name: each["replicas"] for name, each in spec["pytorchReplicaSpecs"].items()} == {
            "Master": 1, "Worker": 1
        }  # fmt: skip
        assert spec["nprocPerNode"] == "2"
    for pod in _pods(job):
        (container,) = pod["containers"]
        asked = {"cpu": "96", "memory": "1000Gi", "rdma/hca": "8", "nvidia.com/gpu": "2"}
        assert container["resources"] == {"limits": asked, "requests": asked}
        assert container["envFrom"] == [{"secretRef": {"name": "tokens"}}]
        assert {"name": "run", "persistentVolumeClaim": {"claimName": "scratch"}} in pod["volumes"]
        assert pod["nodeSelector"] == {"gpu": "a100"}


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset"])
def test_the_pods_command_starts_torchrun_on_its_node(kind: str, tmp_path: Path) -> None:
    """The container's own command, run here with what the controllers set in each pod; python tells its words."""
    text = rendered(*WORDS, FULL[0], f"launcher.kubernetes.kind={kind}")["kubernetes.yaml"]
    files, job = yaml.safe_load_all(text)
    mounted, told = tmp_path / "mounted", tmp_path / "told"
    mounted.mkdir()
    for name, content in files["data"].items():
        (mounted / name).write_text(content)
    container = _pods(job)[-1]["containers"][0]
    command = [word.replace("/etc/dslaunch", str(mounted)) for word in container["command"]]
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{told}\n")
    python.chmod(0o755)
    env = {each["name"]: each["value"].replace("/workspace", str(tmp_path)) for each in container["env"]}
    set_by_controller = {
        "pytorchjob": {
            "RANK": "1",
            "MASTER_ADDR": "vla-tiny-master-0",
            "MASTER_PORT": "23456",
            "WORLD_SIZE": "4",
        },
        "jobset": {"JOB_COMPLETION_INDEX": "1"},
    }
    given = {"PATH": os.environ["PATH"], "HOSTNAME": "pod-1", "DSLAUNCH_PYTHON": str(python)}
    subprocess.run(command, env={**given, **env, **set_by_controller[kind]}, cwd=tmp_path, check=True)
    words = told.read_text().split("\n")
    at = {
        name: words[words.index(name) + 1]
        for name in words
        if name.startswith("--") and name != "--no-python"
    }
    first, port = (
        ("vla-tiny-master-0", "23456") if kind == "pytorchjob" else ("vla-tiny-node-0-0.vla-tiny", "29500")
    )
    expected = {"--nnodes": "2", "--nproc-per-node": "2", "--node-rank": "1"}
    assert at == {**expected, "--master-addr": first, "--master-port": port}
    assert (tmp_path / "vla-tiny" / "rank.sh").read_text() == files["data"]["rank.sh"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "launcher.kubernetes.image: is empty"),
        ([FULL[0], "launcher.pass_env=[A]"], "launcher.kubernetes.secret: is empty, but launcher.pass_env"),
        ([FULL[0], "launcher.kubernetes.queue=A_b"], "lower-case letters"),
        ([FULL[0], "launcher.kubernetes.mount=runs"], "begins with /"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_first(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rendered(*WORDS, *words)


@pytest.mark.parametrize("installed", [True, False])
def test_where_no_cluster_is_reached_nothing_is_launched(installed: bool, tmp_path: Path) -> None:
    """With kubectl itself where it is installed, and without it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    found = [
        Path(each) / "kubectl" for each in os.environ["PATH"].split(":") if (Path(each) / "kubectl").exists()
    ]
    if installed and not found:
        pytest.skip("kubectl is not installed")
    if installed:
        (folder / "kubectl").symlink_to(found[0])
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", *WORDS, FULL[0]],
        env={"PATH": f"{folder}:/usr/bin:/bin" if installed else str(folder), "KUBECONFIG": "/dev/null",
             "PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path)},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 5, done.stderr
    expected = "kubectl reaches no API server" if installed else "kubectl create -f DIR/kubernetes.yaml"
    assert expected in done.stderr
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("shared_memory=64GB", "is '64GB'. Kubernetes takes a whole number and Mi or Gi, such as 64Gi"),
        ("resources.memory=1000GB", "memory is '1000GB'. Kubernetes takes a number, alone or with Ki, Mi, Gi"),
        ("resources.cpu=96 cores", "cpu is '96 cores'. Kubernetes takes a number"),
        ("resources={rdma/hca:'1.5'}", "rdma/hca is '1.5'. Kubernetes takes whole numbers of a device"),
        ("image=Acme/T:1", "is 'Acme/T:1'. An image is [REGISTRY/]NAME[:TAG][@DIGEST], its name in lower-case"),
    ],
)
def test_what_kubernetes_refuses_is_refused_before(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        rendered(*WORDS, "launcher.kubernetes.image=acme/t:1", f"launcher.kubernetes.{word}")


@pytest.mark.parametrize(
    "image",
    ["t", "acme/t:1", "nvcr.io/nvidia/pytorch:25.06-py3", "localhost:5000/a/b", "h:5000/a__b@sha256:" + "a" * 64],
)
def test_images_as_the_kubelet_takes_them(image: str) -> None:
    assert f"image: {image}" in rendered(*WORDS, f"launcher.kubernetes.image={image}")["kubernetes.yaml"]
