"""Fields of Kubernetes objects: those that there are, and what each takes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path as DiskPath
from typing import Any, cast

from dslaunch.errors import nearest
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.manifest import as_list, documents, get
from dslaunch.files.position import Path
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings

_TABLE = DiskPath(__file__).with_name("kubernetes_fields.json")
_SCHEMA = "kubernetes/kubernetes:api/openapi-spec/swagger.json 1.37, as kubernetes-validate 1.37.0 has it"
_CORE: Mapping[str, str] = {
    "ConfigMap": "v1", "CronJob": "batch/v1", "DaemonSet": "apps/v1", "Deployment": "apps/v1", "Job": "batch/v1",
    "PersistentVolumeClaim": "v1", "Pod": "v1", "ReplicaSet": "apps/v1", "Secret": "v1", "Service": "v1",
    "StatefulSet": "apps/v1",
}  # fmt: skip
_OPERATORS: Mapping[str, str] = {
    "JobSet": "jobset.x-k8s.io/v1alpha2", "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "MPIJob": "kubeflow.org/v2beta1", "PyTorchJob": "kubeflow.org/v1",
}  # fmt: skip
_VOLCANO = "batch.volcano.sh/v1alpha1"
_BUILT_IN = ("apps", "batch", "extensions", "v1")
_WRITTEN = re.compile(r"""(?:^|[\s{,\[-])[^\s"'#]+:\s+([^\s,}\]"'#&*!|>][^,}\]#\n]*?)\s*(?:[,}\]]|\s#|$)""")
_GO_NUMBER = re.compile(r"[-+]?(?:\.\d+|\d+(?:\.\d*)?)(?:[eE][-+]?\d+)?")
"""What Go's YAML reads as a number: 1e-5 too, which others read as text."""
_PATCHED = ("DaemonSetSpec", "DeploymentSpec", "JobSpec", "PodSpec", "ReplicaSetSpec", "StatefulSetSpec")
"""What patches give in part."""
_PIECES = re.compile(r"[$<>%]|\{\{")
"""Where a program of its own fills something in."""
Found = tuple[Path, str, str]
"""Where, what is wrong, and the fix."""


@dataclass(frozen=True)
class Typed:
    """One object, and the type that says which fields it has."""

    path: Path
    value: Mapping[str, Any]
    name: str


@cache
def _table() -> Mapping[str, Any]:
    return cast(Mapping[str, Any], json.loads(_TABLE.read_text(encoding="utf-8")))


def types() -> Mapping[str, Mapping[str, str]]:
    """The fields of each type, and what each takes."""
    return cast(Mapping[str, Mapping[str, str]], _table()["types"])


_PATCH = re.compile(r"(?:^|[-_.])patch(?:[-_.]|$)")


def whole(files: FileSet) -> Iterator[File]:
    """The manifests, but for patches that a kustomization among the files names: they reach no API alone."""
    patches: set[str] = set()
    for file in files.of("kubernetes"):
        for _, each in documents(file.value):
            if each.get("kind") in ("Kustomization", "Component"):
                given = [*as_list(each.get("patches")), *as_list(each.get("patchesStrategicMerge"))]
                patches |= {str(get(one, "path") or one).rpartition("/")[2] for one in given}
    named = ((file, file.name.rpartition("/")[2]) for file in files.of("kubernetes"))
    return (file for file, name in named if name not in patches and not _PATCH.search(name))


def typed(value: Any) -> Iterator[Typed]:
    """The objects of a file whose fields are known."""
    for path, each in documents(value):
        kind, version = str(each.get("kind")), str(each.get("apiVersion"))
        if (kind, version) == ("Job", _VOLCANO):
            yield Typed(path, each, "VolcanoJob")
        elif version == {**_CORE, **_OPERATORS}.get(kind):
            yield Typed(path, each, kind)


@rule(
    "kubernetes.field", severity="error", raised_by="nobody",
    evidence=f"{_SCHEMA}; kubectl 1.33: validate is strict by default",
)  # fmt: skip
def unknown(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A field that an object doesn't have: kubectl refuses it, and other clients leave it out."""
    for file in whole(files):
        for each in typed(file.value):
            for path, message, fix in _unknown(each.value, each.name, each.path):
                yield hit(file, path, message, fix)


def _unknown(value: object, kind: str, path: Path) -> Iterator[Found]:
    for inside, own, here in _parts(value, kind, path):
        fields = types()[own]
        for name in inside:
            if name in fields or not isinstance(name, str) or _is_open(name):
                continue
            known = [each for each in fields if each not in inside]
            near = nearest(name, known)
            elsewhere = [other for other in _ROOMS if other != own and name in types()[other]]
            fix = f"It belongs to {_ROOMS[elsewhere[0]]}." if elsewhere else f"Take it out.{near}"
            above = next((part for part in reversed(here) if isinstance(part, str)), own)
            yield (*here, name), f"{above} has no field {name}: kubectl refuses it.", fix


_ROOMS: Mapping[str, str] = {
    "Container": "the container", "PodSpec": "the pod's spec", "JobSpec": "the Job's spec",
    "StatefulSetSpec": "the StatefulSet's spec", "RunPolicy": "runPolicy", "ServiceSpec": "the Service's spec",
    "SecurityContext": "securityContext", "ResourceRequirements": "resources", "ReplicaSpec": "the replica's spec",
    "EmptyDirVolumeSource": "emptyDir", "ObjectMeta": "metadata",
}  # fmt: skip
"""Where a field is often meant to stand."""


def _is_open(text: str) -> bool:
    """Whether it is a patch's own word, or filled in later."""
    return _PIECES.search(text) is not None


def _parts(value: object, kind: str, path: Path) -> Iterator[tuple[Mapping[str, Any], str, Path]]:
    """Each object below, with its type."""
    if kind[:2] == "[]":
        for index, each in enumerate(value if isinstance(value, list) else ()):
            yield from _parts(each, kind[2:], (*path, index))
    elif kind[:2] == "{}":
        for name, each in value.items() if isinstance(value, dict) else ():
            yield from _parts(each, kind[2:], (*path, str(name)))
    elif kind in types() and isinstance(value, dict):
        yield value, kind, path
        for name, inner in types()[kind].items():
            if value.get(name) is not None:
                yield from _parts(value[name], inner, (*path, name))


def mistyped(file: File) -> Iterator[Found]:
    """Values of another type than their field takes."""
    for each in typed(file.value):
        for inside, own, here in _parts(each.value, each.name, each.path):
            for name, kind in types()[own].items():
                if inside.get(name) is not None:
                    yield from _judged(file, inside[name], kind, (*here, name))
            missing = [name for name in _table()["needed"].get(own, ()) if inside.get(name) is None]
            if missing and own not in _PATCHED and not any(str(name).startswith("$") for name in inside):
                above = next((part for part in reversed(here) if isinstance(part, str)), own)
                message = f"{above} lacks {missing[0]}: the API refuses the object."
                yield here, message, f"Add {missing[0]}."


def _judged(file: File, value: object, kind: str, path: Path) -> Iterator[Found]:
    if isinstance(value, str) and _is_open(value):
        return
    name = next(str(part) for part in reversed(path) if isinstance(part, str))
    if kind[:2] == "[]":
        if not isinstance(value, list):
            yield path, f"{name} takes a list: the API refuses the object.", "Write a list, a dash before each."
        for index, each in enumerate(value if isinstance(value, list) else ()):
            if each is not None and (kind[2:] not in types() or not isinstance(each, dict)):
                yield from _judged(file, each, kind[2:], (*path, index))
    elif kind[:2] == "{}":
        if not isinstance(value, dict):
            message = f"{name} takes names with values: the API refuses the object."
            yield path, message, "Write NAME: VALUE below it."
        for key, each in value.items() if isinstance(value, dict) else ():
            if each is not None and (kind[2:] not in types() or not isinstance(each, dict)):
                yield from _judged(file, each, kind[2:], (*path, str(key)))
    elif kind in types():
        if not isinstance(value, dict):
            yield path, f"{name} takes fields of its own: the API refuses the object.", "Write them below it."
    elif wrong := _wrong(file, value, kind, path):
        yield path, f"{name}: {wrong[0]}: the API refuses the object.", wrong[1]


def _wrong(file: File, value: object, kind: str, path: Path) -> tuple[str, str] | None:
    if kind == "string":
        plain = _plain(file, path) if not isinstance(value, (dict, list)) else None
        if isinstance(value, (dict, list)):
            return "text is expected", "Write one text."
        numeric = plain is not None and _GO_NUMBER.fullmatch(plain) is not None
        if numeric or isinstance(value, bool) or (type(value) in (int, float) and plain is None):
            return f"{plain if plain is not None else value} is no text", "Put it in quotes."
    elif kind == "integer" and (type(value) is not int and not (isinstance(value, float) and value.is_integer())):
        return f"a whole number is expected, and {value!r} is none", "Write a number, without quotes."
    elif kind == "boolean" and not isinstance(value, bool):
        return f"true or false is expected, and {value!r} is neither", "Write true or false, without quotes."
    elif kind == "integer or string" and (isinstance(value, bool) or not isinstance(value, (int, str))):
        return f"a whole number or a name is expected, and {value!r} is neither", "Write one of these."
    elif kind == "quantity" and isinstance(value, (dict, list, bool)):
        return "a quantity is expected", "Write a number with its unit, such as 64Gi."
    return None


def _plain(file: File, path: Path) -> str | None:
    """The value as it is written, without quotes; None where it isn't told, or has some."""
    at = file.at(*path)
    line = file.text.split("\n")[at.line - 1][at.column - 1 :] if file.text else ""
    found = _WRITTEN.match(" " + (line if isinstance(path[-1], str) else f"x: {line.removeprefix('- ')}"))
    return found[1] if found else None


def of_other_group(file: File) -> Iterator[Found]:
    """Objects whose apiVersion has no such kind."""
    for path, each in documents(file.value):
        kind, version = str(each.get("kind")), str(each.get("apiVersion"))
        right = {**_CORE, **_OPERATORS}.get(kind)
        if right and version != right and version.partition("/")[0] in _BUILT_IN:
            message = f"{version} has no {kind}: the API takes no such object."
            yield (*path, "apiVersion"), message, f"Write apiVersion: {right}."
