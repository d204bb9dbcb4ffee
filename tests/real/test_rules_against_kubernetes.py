"""What we say of the fields of Kubernetes objects, beside the API's own schema."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import dslaunch.rules.containers.fields as fields
from dslaunch.files.fileset import read_fileset
from dslaunch.rules.registry import rule_named
from dslaunch.rules.settings import Settings
from tests.real import kubernetes_fields
from tests.real.parts import need

need("kubernetes_validate")

TABLE = Path(fields.__file__).with_name("kubernetes_fields.json")
MANIFESTS = 400
POD: dict[str, Any] = {
    "restartPolicy": "Never", "subdomain": "train", "hostNetwork": True, "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "securityContext": {"runAsUser": 0, "fsGroup": 0},
    "containers": [{
        "name": "train", "image": "registry/train:1", "command": ["torchrun"], "args": ["--nnodes=2", "train.py"],
        "env": [
            {"name": "NCCL_DEBUG", "value": "INFO"},
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        "envFrom": [{"configMapRef": {"name": "config", "optional": True}}],
        "ports": [{"name": "rdzv", "containerPort": 29500}],
        "resources": {"limits": {"nvidia.com/gpu": 8, "memory": "64Gi"}, "requests": {"cpu": "8"}},
        "readinessProbe": {"tcpSocket": {"port": 29500}, "periodSeconds": 5},
        "securityContext": {"privileged": False, "capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm", "readOnly": False}],
    }],
    "volumes": [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}},
        {"name": "config", "configMap": {"name": "config", "items": [{"key": "a", "path": "b"}]}},
    ],
}  # fmt: skip
META = {"name": "train", "labels": {"app": "train"}, "annotations": {"a": "b"}}
TEMPLATE = {"metadata": {"labels": {"app": "train"}}, "spec": POD}
OBJECTS: list[dict[str, Any]] = [
    {"apiVersion": "v1", "kind": "Pod", "metadata": META, "spec": POD},
    {"apiVersion": "batch/v1", "kind": "Job", "metadata": META, "spec": {
        "completions": 2, "parallelism": 2, "completionMode": "Indexed", "backoffLimit": 0, "suspend": False,
        "ttlSecondsAfterFinished": 60, "template": TEMPLATE,
    }},
    {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": META, "spec": {
        "serviceName": "train", "replicas": 2, "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": {"app": "train"}}, "template": TEMPLATE,
    }},
    {"apiVersion": "v1", "kind": "Service", "metadata": META, "spec": {
        "clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "train"},
        "ports": [{"name": "rdzv", "port": 29500, "targetPort": "rdzv"}],
    }},
    {"apiVersion": "v1", "kind": "ConfigMap", "metadata": META, "data": {"a": "b"}, "immutable": True},
]  # fmt: skip
OTHERS: list[Any] = [
    "text", "8", "", 8, 0, 2.5, True, False, ["text"], [1], {"a": "b"}, {"a": 1}, [{"a": "b"}], [], {},
]  # fmt: skip


def test_the_table_is_what_the_schema_says() -> None:
    table, schema = json.loads(TABLE.read_text(encoding="utf-8")), kubernetes_fields.schema()
    assert table["types"] == kubernetes_fields.table(schema)
    assert table["needed"] == kubernetes_fields.needed(schema, table["types"])


def test_changed_manifests_are_judged_as_the_schema_judges_them() -> None:
    from kubernetes_validate import SchemaNotFoundError, ValidationError, validate

    chance = random.Random(5)
    refused = {"ours": 0, "theirs": 0}
    version = kubernetes_fields.VERSION.rpartition(".")[0]
    for _ in range(MANIFESTS):
        each = copy.deepcopy(chance.choice(OBJECTS))
        what = _change(each, chance)
        try:
            validate(each, version, strict=True)
            theirs = ""
        except SchemaNotFoundError:  # the change made it another object
            continue
        except ValidationError as error:
            theirs = error.message
        ours = _said(each)
        assert bool(ours) == bool(theirs), (what, ours, theirs, yaml.safe_dump(each))
        refused["ours"] += bool(ours)
        refused["theirs"] += bool(theirs)
    print(f"{MANIFESTS} manifests: {refused}")
    assert refused["ours"] > MANIFESTS / 4


def _said(value: dict[str, Any]) -> list[str]:
    """What we say of its fields and their types."""
    files = read_fileset({"a.yaml": yaml.safe_dump(value)})
    unknown = [hit.message for hit in rule_named("kubernetes.field").check(None, files, Settings())]
    return unknown + [message for _, message, _ in fields.mistyped(files.files[0])]


def _change(value: dict[str, Any], chance: random.Random) -> str:
    """One key misspelt, put elsewhere, or given another value; at times nothing."""
    fixed = ("apiVersion", "kind", "spec", "template", "selector")  # of these a patch may have a part
    places = [place for place in _places(value, ()) if place[-1] not in fixed]
    place = chance.choice(places)
    above: Any = _get_at(value, place[:-1])
    match chance.randrange(4):
        case 0 if isinstance(above, dict):
            above[f"{place[-1]}s"] = above.pop(place[-1])
            return f"misspelt {place}"
        case 1:
            target = _get_at(value, chance.choice(places)[:-1])
            if isinstance(target, dict) and isinstance(above, dict):
                target[place[-1]] = copy.deepcopy(above[place[-1]])
            return f"moved {place}"
        case 2:
            return "nothing"
        case _:
            above[place[-1]] = copy.deepcopy(chance.choice(OTHERS))
            return f"{place} = {above[place[-1]]!r}"


def _get_at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (*path, key)
        yield from _places(each, (*path, key))
