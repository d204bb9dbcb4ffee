"""What the services of a compose file meet when they run: variables, shared memory, each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dslaunch.errors import nearest
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.manifest import as_dict, as_list, get
from dslaunch.files.position import Path
from dslaunch.planfile import Plan
from dslaunch.rules.containers.compose import devices, in_service, services
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings

_INTERPOLATION = "compose-spec/compose-spec:12-interpolation.md; docker compose 2.40.3, run"
_COMPOSE = "compose-spec/compose-spec:05-services.md; the manual page of docker run 28.0, --shm-size"
_VARIABLE = re.compile(r"(?<!\$)(?:\$\$)*\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
_WORKERS = re.compile(r"--(?:dataloader_)?num[_-]workers[= ]+['\"]?([1-9]\d*)")
_LEAST = 1 << 20
"""Bytes below which no shared memory is meant."""
_LOCAL = re.compile(r"localhost|127\.0\.0\.1|0\.0\.0\.0")


@rule("compose.interpolation", severity="error", raised_by="nobody", evidence=_INTERPOLATION)
def interpolation(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """$NAME in a command that the service's own environment sets: compose fills it in before that."""
    outside = {each.name for file in files.of("env") for each in file.assignments}
    for file, name, service in services(files):
        own = _environment(service)
        for path, text in _texts(service, ("services", name)):
            seen: set[str] = set()
            for found in _VARIABLE.finditer(text):
                variable = found[1] or found[2]
                if own.get(variable) is None or variable in outside or variable in seen or "$" in own[variable]:
                    continue
                seen.add(variable)
                written = found[0].lstrip("$")
                message = (
                    f"docker compose fills in ${written} from its own environment, not from the service's: it is "
                    "empty there, unless the caller has it too."
                )
                yield hit(file, path, message, f"Write $${written}, which the container's shell fills in.")


def _environment(service: Mapping[str, Any]) -> dict[str, str]:
    """What a service sets itself; not what it hands on from outside."""
    given = service.get("environment")
    if isinstance(given, dict):
        return {str(name): str(value) for name, value in given.items() if value is not None}
    parts = (each.partition("=") for each in as_list(given) if isinstance(each, str))
    return {name: value for name, equals, value in parts if equals}


def _texts(service: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, str]]:
    for key in ("entrypoint", "command"):
        given = service.get(key)
        if isinstance(given, str):
            yield (*path, key), given
        listed = enumerate(as_list(given))
        yield from (((*path, key, index), each) for index, each in listed if isinstance(each, str))


@rule("compose.shared-memory", severity="memory", raised_by="torch", evidence=_COMPOSE)
def shared_memory(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A service of several GPUs, or with workers of a loader, that has 64 MiB at /dev/shm, or some bytes."""
    for file, name, service in services(files):
        places = [str(each).split(":")[1:2] for each in as_list(service.get("volumes")) if isinstance(each, str)]
        mounted = ["/dev/shm"] in places or "/dev/shm" in str(service.get("tmpfs"))
        targets = [get(each, "target") for each in as_list(service.get("volumes"))]
        size = str(service.get("shm_size", ""))
        if size.isdecimal() and 0 < int(size) < _LEAST:
            message = f"shm_size: {size} is {size} bytes: a unit is missing."
            yield hit(file, ("services", name, "shm_size"), message, f"Write shm_size: {size}g.")
        if "shm_size" in service or "ipc" in service or "extends" in service or mounted or "/dev/shm" in targets:
            continue
        several, loads = _processes(file, name, service)
        if several or loads:
            message = "/dev/shm has 64 MiB here, which NCCL and the workers of loaders run out of (bus error)."
            yield hit(file, ("services", name), message, "Add ipc: host, or shm_size: 16gb.")


def _processes(file: File, name: str, service: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether it starts several processes on GPUs, and whether they have loaders with workers."""
    launches = [each for inner in in_service(file, name, service) for each in inner.file.value.launches]
    parallel = [each for each in launches if each.launchers[0].program != "python"]
    asked = service.get("gpus") or service.get("runtime") or get(service, "deploy", "resources")
    on_gpus = devices(service) != 0 and asked
    counts = [each.launchers[-1].options.value("--nproc-per-node", "--nproc_per_node") for each in parallel]
    several = bool(on_gpus) and any(count is not None and count not in ("1", "") for count in counts)
    words = " ".join(text for _, text in _texts(service, ()))
    return several, bool(parallel) and _WORKERS.search(words) is not None


@rule("compose.meeting", severity="hang", raised_by="nobody", evidence=_COMPOSE)
def meeting(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Services that train together and meet at a name that none has, or that wait for each other's end."""
    for file in files.of("compose"):
        every = {str(name): each for name, each in file.value["services"].items() if isinstance(each, dict)}
        meets = {name: at for name, each in every.items() if (at := _meets(each))}
        names = {other for name, each in every.items() for other in _called(name, each)}
        for name, (key, host) in meets.items():
            service, path = every[name], ("services", name, "environment", *key)
            if service.get("network_mode") or "$" in host or "extra_hosts" in service or "." in host:
                continue
            together = [other for other in meets if meets[other][1] == host]
            if _LOCAL.fullmatch(host):
                if len(together) > 1:
                    message = f"MASTER_ADDR={host} is each of {len(together)} services itself: they never meet."
                    yield hit(file, path, message, "Write the name of the service with rank 0.")
                continue
            if host not in names and len(together) > 1 and (near := nearest(host, names)):
                message = f"no service is called {host}: nobody answers there.{near}"
                yield hit(file, path, message, "Write the name of the service with rank 0.")
        yield from _waits(file, every, meets)


def _meets(service: Mapping[str, Any]) -> tuple[tuple[str | int, ...], str] | None:
    """MASTER_ADDR of a service, with its place."""
    given = service.get("environment")
    if isinstance(given, dict) and isinstance(given.get("MASTER_ADDR"), str):
        return ("MASTER_ADDR",), given["MASTER_ADDR"]
    for index, each in enumerate(as_list(given)):
        if isinstance(each, str) and each.startswith("MASTER_ADDR="):
            return (index,), each.partition("=")[2]
    return None


def _called(name: str, service: Mapping[str, Any]) -> Iterator[str]:
    """Every name that other services find it by."""
    yield name
    yield from (str(service[key]) for key in ("container_name", "hostname") if key in service)
    for net in as_dict(service.get("networks")).values():
        yield from (str(each) for each in as_list(get(net, "aliases")))


def _waits(
    file: File, every: Mapping[str, Mapping[str, Any]], meets: Mapping[str, tuple[tuple[str | int, ...], str]]
) -> Iterator[Hit]:
    """One that starts once another has ended, or is healthy, which it isn't before all have met."""
    for name in meets:
        for other, asked in as_dict(every[name].get("depends_on")).items():
            if other in meets and get(asked, "condition") == "service_completed_successfully":
                message = f"{name} starts once {other} has ended, and {other} waits for it to train with."
                path = ("services", name, "depends_on", other)
                yield hit(file, path, message, "Write condition: service_started.")
