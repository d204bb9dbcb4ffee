"""status, logs, stop and resume of a run on Kubernetes, with a stand-in for kubectl that judges what it is asked.

What it answers has the form of kubectl 1.32's JSON, with a PyTorchJob's and a JobSet's conditions and labels.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command import CommandLine

_KUBECTL = """#!{python}
import json, pathlib, sys
home = pathlib.Path(__file__).parent
words = sys.argv[1:]
text = sys.stdin.read() if "-" in words else ""
with (home / "calls").open("a") as calls:
    calls.write(json.dumps([words, text]) + "\\n")
state = json.loads((home / "cluster.json").read_text())
options = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
flags = {{word for word in words[1:] if word.startswith("-") and "=" not in word}}
match words[0]:
    case "create":
        assert words[1] == "-f" and len(words) == 3, words
        print("configmap/tiny created\\n" + state["name"] + " created")
    case "get" if words[1] == "pods":
        assert options["selector"] == state["selector"] and options["output"] == "json", words
        print(json.dumps({{"items": state["pods"]}}))
    case "get":
        assert options["output"] == "json", words
        if words[1] != state["name"] or state["gone"]:
            sys.exit('Error from server (NotFound): "' + words[1] + '" not found')
        print(json.dumps({{"status": {{"conditions": state["conditions"]}}}}))
    case "logs":
        assert flags <= {{"--prefix", "--follow"}}, flags
        assert set(options) <= {{"selector", "tail", "max-log-requests", "namespace"}}, options
        print("said by " + (options.get("selector") or words[1]))
    case "delete":
        assert "--ignore-not-found" in flags and "--wait" in flags, words
        state["gone"] = True
        (home / "cluster.json").write_text(json.dumps(state))
    case _:
        sys.exit("unknown command " + words[0])
"""
_LAUNCH = (
    "recipe=vla_tiny", "cluster=2x2xA100", "training.micro_batch=4", "module=", "script=train.py",
    "launcher=kubernetes", "launcher.kubernetes.image=i", "launcher.kubernetes.namespace=train", "engine=torch",
    "strategy=ddp",
)  # fmt: skip
_PYTORCH = "training.kubeflow.org"


class Cluster:
    """What the stand-in answers, and what it was asked."""

    def __init__(self, home: Path, kind: str) -> None:
        self._home = home
        resource, label = {
            "pytorchjob": ("pytorchjobs.kubeflow.org", f"{_PYTORCH}/job-name"),
            "jobset": ("jobsets.jobset.x-k8s.io", "jobset.sigs.k8s.io/jobset-name"),
        }[kind]
        name = f"{resource}/vla-tiny"
        self.kind, self.state = kind, {"name": name, "selector": f"{label}=vla-tiny", "gone": False}
        self.become([], [])

    def become(self, conditions: list[dict[str, str]], pods: list[dict[str, Any]]) -> None:
        self.state |= {"conditions": conditions, "pods": pods, "gone": False}
        (self._home / "cluster.json").write_text(json.dumps(self.state))

    def pod(self, node: int, phase: str, exit_code: int | None = None, at: str = "") -> dict[str, Any]:
        labels = {"batch.kubernetes.io/job-completion-index": str(node)}
        if self.kind == "pytorchjob":
            index = {f"{_PYTORCH}/replica-index": str(max(0, node - 1))}
            labels = {f"{_PYTORCH}/replica-type": "worker" if node else "master", **index}
        ended = {"terminated": {"exitCode": exit_code, "finishedAt": at}} if exit_code is not None else {}
        status = {"phase": phase, "containerStatuses": [{"state": ended}]}
        return {"metadata": {"name": f"pod-{node}", "labels": labels}, "status": status}

    def calls(self) -> list[list[str]]:
        return [json.loads(line)[0] for line in (self._home / "calls").read_text().splitlines()]

    def created(self) -> str:
        """The text that the last `create` got."""
        lines = [json.loads(line) for line in (self._home / "calls").read_text().splitlines()]
        return next(str(text) for words, text in reversed(lines) if words[0] == "create")


def _cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> Cluster:
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(_KUBECTL.format(python=sys.executable))
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(kubectl.parent), prepend=":")
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    Path("train.py").write_text("")
    return Cluster(kubectl.parent, kind)


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset"])
def test_a_run_on_kubernetes_is_looked_at_stopped_and_resumed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dslaunch: CommandLine
) -> None:
    cluster = _cluster(tmp_path, monkeypatch, kind)
    words = (f"launcher.kubernetes.kind={kind}", "launcher.kubernetes.volume_claim=v")
    launched = dslaunch("launch", *_LAUNCH, *words)
    assert launched.status == 0, launched.err
    assert cluster.calls() == [["create", "-f", "kubernetes.yaml"]]
    (run,) = Path("runs").iterdir()

    assert "queued: pods: none yet" in _status(dslaunch)
    cluster.become([{"type": "Running", "status": "True"}], [cluster.pod(1, "Running"), cluster.pod(0, "Running")])
    shown = _status(dslaunch)
    assert "running: pods: 2 Running" in shown
    assert f"Kubernetes, {cluster.state['name']}" in shown
    assert json.loads(dslaunch("logs", "--json").out)["lines"] == [f"said by {cluster.state['selector']}"]
    assert json.loads(dslaunch("logs", "--rank", "3", "--json").out)["lines"] == ["said by pod-1"]
    assert dslaunch("resume", run.name).status == 2

    later = cluster.pod(0, "Failed", 1, "2026-01-01T00:00:09Z")
    first = cluster.pod(1, "Failed", 7, "2026-01-01T00:00:08Z")
    cluster.become([{"type": "Failed", "status": "True", "message": "pod-1 failed"}], [later, first])
    assert "state failed: pod-1 failed" in _status(dslaunch)
    assert json.loads(dslaunch("logs", "--first-error", "--json").out)["lines"] == ["said by pod-1"]

    again = dslaunch("resume", run.name)
    assert again.status == 0, again.err
    assert "attempt 2, from the newest checkpoint on its volume" in again.out + again.err
    assert [words[0] for words in cluster.calls()[-2:]] == ["delete", "create"]
    containers = _containers(list(yaml.safe_load_all(cluster.created())))
    assert containers
    assert all({"name": "DSLAUNCH_ATTEMPT", "value": "2"} in each["env"] for each in containers)

    cluster.become([], [cluster.pod(0, "Running"), cluster.pod(1, "Pending")])
    assert "1 Pending, 1 Running" in _status(dslaunch)
    stopped = dslaunch("stop", run.name)
    assert stopped.status == 0, stopped.err
    assert cluster.calls()[-1][0] == "delete"
    assert "--namespace=train" in cluster.calls()[-1]
    assert "state stopped" in _status(dslaunch)
    assert "said by" in dslaunch("logs").out
    assert (run / "logs" / "attempt-2" / "launcher.log").is_file()


def _status(dslaunch: CommandLine) -> str:
    """With one blank between words."""
    return " ".join(dslaunch("status").out.split())


def _containers(value: object) -> list[dict[str, Any]]:
    if isinstance(value, dict):
        own = value.get("containers", [])
        return [*own, *(each for item in value.values() for each in _containers(item))]
    return [each for item in value for each in _containers(item)] if isinstance(value, list) else []


def test_what_kubernetes_does_not_know_or_answer_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dslaunch: CommandLine
) -> None:
    cluster = _cluster(tmp_path, monkeypatch, "pytorchjob")
    assert dslaunch("launch", *_LAUNCH).status == 0
    (run,) = Path("runs").iterdir()
    cluster.become([{"type": "Succeeded", "status": "True"}], [])
    assert "state finished" in _status(dslaunch)
    assert dslaunch("resume", run.name).status == 2
    cluster.state["name"] = "other"
    cluster.become([], [])
    assert "lost: Kubernetes has no pytorchjobs.kubeflow.org/vla-tiny: it was deleted" in _status(dslaunch)
    refused = dslaunch("resume", run.name)
    assert refused.status == 2
    assert "its checkpoints went with its pods" in refused.err
    (tmp_path / "bin" / "kubectl").write_text("#!/bin/sh\necho 'connection refused' >&2; exit 1\n")
    assert "unknown: kubectl: connection refused" in _status(dslaunch)
