"""What `docker compose` doesn't take of a file, and stops at before it starts anything."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dslaunch.errors import nearest
from dslaunch.files.fileset import FileSet
from dslaunch.files.manifest import as_dict, as_list, get
from dslaunch.files.position import Path
from dslaunch.planfile import Plan
from dslaunch.rules.containers.fields import Found
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings

_SPEC = "compose-spec/compose-go:schema/compose-spec.json, loader/validate.go; docker compose 2.40.3, run"
_SERVICE_KEYS = """
    annotations attach blkio_config build cap_add cap_drop cgroup cgroup_parent command configs
    container_name cpu_count cpu_percent cpu_period cpu_quota cpu_rt_period cpu_rt_runtime cpu_shares
    cpus cpuset credential_spec depends_on deploy develop device_cgroup_rules devices dns dns_opt
    dns_search domainname entrypoint env_file environment expose extends external_links extra_hosts gpus
    group_add healthcheck hostname image init ipc isolation label_file labels links logging mac_address
    mem_limit mem_reservation mem_swappiness memswap_limit models network_mode networks oom_kill_disable
    oom_score_adj pid pids_limit platform ports post_start pre_start pre_stop privileged profiles
    provider pull_policy pull_refresh_after read_only restart runtime scale secrets security_opt shm_size
    stdin_open stop_grace_period stop_signal storage_opt sysctls tmpfs tty ulimits use_api_socket user
    userns_mode uts volumes volumes_from working_dir"""
_SERVICE = frozenset(_SERVICE_KEYS.split())
_TOP = frozenset({
    "configs", "include", "models", "name", "networks", "secrets", "services", "version", "volumes",
})  # fmt: skip
_DEPLOY = frozenset({
    "endpoint_mode", "labels", "mode", "placement", "replicas", "resources", "restart_policy", "rollback_config",
    "update_config",
})  # fmt: skip
_LIMITS, _RESERVATIONS = frozenset({"cpus", "memory", "pids"}), frozenset({
    "cpus", "devices", "generic_resources", "memory",
})  # fmt: skip
_DEVICE = frozenset({"capabilities", "count", "device_ids", "driver", "options"})
_SHAPES: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "command": ((str, list), "a text or a list"), "depends_on": ((list, dict), "a list or names with conditions"),
    "entrypoint": ((str, list), "a text or a list"), "environment": ((list, dict), "a list or names with values"),
    "networks": ((list, dict), "a list or names"), "ports": (list, "a list"), "profiles": (list, "a list"),
    "ulimits": (dict, "names with numbers"), "volumes": (list, "a list"),
}  # fmt: skip
"""What a service's keys take."""
_SIZE = re.compile(r"-1|\d+(?:\.\d+)? ?(?:[kmgtp]i?b|[kmgtp]|b)?", re.IGNORECASE)
_SIZES = ("mem_limit", "mem_reservation", "shm_size")
_BROKEN = re.compile(r"(?<!\$)(?:\$\$)*\$\{(?![A-Za-z_]\w*(?:\}|:?[-?+]))[^}]*\}")
"""${...} that compose can't fill in, such as the shell's ${A%%-*} and ${#A}."""
_NAMED_VOLUME = re.compile(r"[A-Za-z0-9][\w.-]*")


@rule("compose.refused", severity="error", raised_by="nobody", evidence=_SPEC)
def refused(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """What docker compose doesn't take: unknown keys, GPUs that are asked for in part, names that nothing has."""
    for file in files.of("compose"):
        value = file.value
        whole = all(_is_whole(service) for service in value["services"].values()) and "include" not in value
        found = [*_unknown(value, _TOP, (), "the file")]
        for name, service in value["services"].items():
            if isinstance(service, dict):
                path: Path = ("services", name)
                found += [*_of_service(service, path), *_texts(service, path), *_environment(service, path)]
                found += _names(value, service, path) if whole and len(files.of("compose")) == 1 else ()
        for path, message, fix in found:
            yield hit(file, path, message, fix)


def _is_whole(service: object) -> bool:
    """Whether it is more than a part that another file completes."""
    return isinstance(service, dict) and ("image" in service or "build" in service) and "extends" not in service


def _unknown(values: Mapping[str, Any], known: frozenset[str], path: Path, where: str) -> Iterator[Found]:
    for key in values:
        if isinstance(key, str) and key not in known and not key.startswith("x-"):
            message = f"{where} has no key {key}: docker compose stops.{nearest(key, known)}"
            yield (*path, key), message, "Correct it."


def _of_service(service: Mapping[str, Any], path: Path) -> Iterator[Found]:
    yield from _unknown(service, _SERVICE, path, str(path[-1]))
    deploy = as_dict(service.get("deploy"))
    yield from _unknown(deploy, _DEPLOY, (*path, "deploy"), "deploy")
    resources = as_dict(deploy.get("resources"))
    for key, known in (("limits", _LIMITS), ("reservations", _RESERVATIONS)):
        here = (*path, "deploy", "resources", key)
        yield from _unknown(as_dict(resources.get(key)), known, here, f"resources.{key}")
    here = (*path, "deploy", "resources", "reservations", "devices")
    for index, device in enumerate(as_list(get(resources, "reservations", "devices"))):
        yield from _of_device(device, (*here, index), asked=True)
    gpus = service.get("gpus")
    if gpus is not None and gpus != "all" and not isinstance(gpus, list) and "$" not in str(gpus):
        yield (*path, "gpus"), f"gpus takes all or a list, not {gpus}.", f"Write gpus: [{{count: {gpus}}}]."
    for index, device in enumerate(as_list(gpus)):
        yield from _of_device(device, (*path, "gpus", index), asked=False)
    if service.get("network_mode") and service.get("networks"):
        message = "network_mode and networks exclude each other: docker compose stops."
        yield (*path, "networks"), message, "Keep one."
    replicas = deploy.get("replicas", service.get("scale"))
    if service.get("container_name") and type(replicas) is int and replicas > 1:
        message = f"{replicas} containers can't all be called {service['container_name']}: docker compose stops."
        yield (*path, "container_name"), message, "Leave the name out."
    limit = get(resources, "limits", "memory")
    if service.get("mem_limit") and limit and str(limit) != str(service["mem_limit"]):
        message = f"mem_limit is {service['mem_limit']}, and deploy's limit {limit}: docker compose stops."
        yield (*path, "mem_limit"), message, "Keep one."


def _of_device(device: object, path: Path, *, asked: bool) -> Iterator[Found]:
    values = as_dict(device)
    yield from _unknown(values, _DEVICE, path, "a device")
    if values and asked and "capabilities" not in values:
        yield path, "a device without capabilities: docker compose stops.", "Add capabilities: [gpu]."
    if isinstance(values.get("capabilities"), str):
        yield (*path, "capabilities"), "capabilities takes a list: docker compose stops.", "Write [gpu]."
    if "count" in values and "device_ids" in values:
        message = "count and device_ids exclude each other: docker compose stops."
        yield (*path, "count"), message, "Keep one."
    for index, each in enumerate(as_list(values.get("device_ids"))):
        if not isinstance(each, str):
            message = f"the device {each} is no text: docker compose stops."
            yield (*path, "device_ids", index), message, f'Write "{each}".'
    count = values.get("count")
    if isinstance(count, str) and count != "all" and not count.isdecimal() and "$" not in count:
        yield (*path, "count"), f"count takes all or a number, not {count}.", "Write count: all."


def _environment(service: Mapping[str, Any], path: Path) -> Iterator[Found]:
    for index, each in enumerate(as_list(service.get("environment"))):
        if isinstance(each, dict) and each:
            name, value = next(iter(each.items()))
            message = f"a list of environment holds NAME=value, not {name}: {value}: docker compose stops."
            yield (*path, "environment", index), message, f"Write {name}={value}."
    for key, (kind, what) in _SHAPES.items():
        value = service.get(key)
        if value is not None and not isinstance(value, kind) and "$" not in str(value):
            yield (*path, key), f"{key} takes {what}: docker compose stops.", "Write it so."


def _texts(service: Mapping[str, Any], path: Path) -> Iterator[Found]:
    """Words that are no text, sizes that aren't read, and ${...} of the shell's."""
    for key in ("command", "entrypoint"):
        given = service.get(key)
        for index, each in enumerate(as_list(given)):
            if not isinstance(each, str) and each is not None:
                message = f"{each} is no text: docker compose stops."
                yield (*path, key, index), message, f'Write "{each}".'
        for place, text in [((), given), *(((index,), each) for index, each in enumerate(as_list(given)))]:
            if isinstance(text, str) and (found := _BROKEN.search(text)):
                message = f"docker compose fills in {found[0]} itself, and stops: it knows no such form."
                yield (*path, key, *place), message, f"Write ${found[0]}, which leaves it to the shell."
    for key in _SIZES:
        size = service.get(key)
        if isinstance(size, str) and "$" not in size and not _SIZE.fullmatch(size):
            message = f"{key}: {size} is no size: docker compose stops."
            yield (*path, key), message, "Write b, k, m or g behind the number, such as 16g."


def _names(value: Mapping[str, Any], service: Mapping[str, Any], path: Path) -> Iterator[Found]:
    """Services, networks and volumes that the file doesn't have."""
    depends = service.get("depends_on")
    for index, other in enumerate(depends if isinstance(depends, (list, dict)) else ()):
        if isinstance(other, str) and other not in value["services"] and "$" not in other:
            place = other if isinstance(depends, dict) else index
            message = f"there is no service {other}: docker compose stops.{nearest(other, value['services'])}"
            yield (*path, "depends_on", place), message, "Correct the name."
    nets = service.get("networks")
    for index, net in enumerate(nets if isinstance(nets, (list, dict)) else ()):
        known = as_dict(value.get("networks"))
        if isinstance(net, str) and net != "default" and net not in known and "$" not in net:
            place = net if isinstance(nets, dict) else index
            message = f"there is no network {net}: docker compose stops."
            yield (*path, "networks", place), message, "Add it to networks."
    for index, volume in enumerate(as_list(service.get("volumes"))):
        source = volume.partition(":")[0] if isinstance(volume, str) and ":" in volume else ""
        if isinstance(volume, dict) and volume.get("type") == "volume":
            source = str(volume.get("source") or "")
        if _NAMED_VOLUME.fullmatch(source) and source not in as_dict(value.get("volumes")):
            message = f"there is no volume {source}: docker compose stops."
            yield (*path, "volumes", index), message, "Add it to volumes."
