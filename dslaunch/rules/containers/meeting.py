"""Where the pods of a training meet: names that DNS knows, the Services behind them, and their ports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dslaunch.errors import nearest
from dslaunch.files.commands import Launcher
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.flags import is_told
from dslaunch.files.manifest import Container, Pods, Workload, workloads
from dslaunch.files.position import Position
from dslaunch.planfile import Plan
from dslaunch.rules.containers.manifests import of_containers
from dslaunch.rules.containers.names import Service, domain_of, pod_names, services_of
from dslaunch.rules.launchers.torchrun import option
from dslaunch.rules.registry import Hit, Severity, rule
from dslaunch.rules.settings import Settings

_OPERATOR = "kubeflow/training-operator:pkg/controller.v1/pytorch/envvar.go 1.8"
_DNS = "the documentation of Kubernetes 1.33: DNS for Services and Pods, Services, StatefulSets, Jobs"
_LOCAL = re.compile(r"localhost|127\.0\.0\.1|0\.0\.0\.0")
_NUMERIC = re.compile(r"[\d.:\[\]a-fA-F]+")
_OF_OPERATOR = re.compile(r"(?P<job>[a-z0-9-]+)-(?P<role>master|worker)-\d+")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\}|\((\w+)\))")
_ADDRESSES = ("MASTER_ADDR", "PET_MASTER_ADDR")
_ENDPOINTS = ("PET_RDZV_ENDPOINT", "RDZV_ENDPOINT")
_PORTS = ("MASTER_PORT", "PET_MASTER_PORT")
@dataclass(frozen=True)
class Point:
    """One place where a container says where to meet."""

    file: File
    workload: Workload
    pods: Pods
    at: Position
    host: str
    port: int | None
    of_variable: bool
    """It stands in MASTER_ADDR, which an operator may write again."""


Fault = tuple[str, str, Severity]
"""What is wrong, the fix, and how grave it is."""


@rule("kubernetes.master-address", severity="hang", raised_by="nobody", evidence=f"{_OPERATOR}; {_DNS}")
def master_address(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A meeting point that each pod takes for itself, that has no name or port, or that the operator sets."""
    if not files.of("kubernetes"):
        return
    services = [*services_of(files)]
    every = (each for file in files.of("kubernetes") for each in workloads(file.value))
    everyone = [(each, pods) for each in every for pods in each.kinds]
    for point in (*_of_variables(files), *_of_options(files)):
        here = [each for each in services if each.file is point.file]
        here += [each for each in services if each.name not in {one.name for one in here}]
        for message, fix, severity in _judged(point, here, everyone):
            yield Hit(point.file.name, point.at, message, fix, severity)
            break


def _of_variables(files: FileSet) -> Iterator[Point]:
    """What the pods' variables say."""
    for file in files.of("kubernetes"):
        for workload in workloads(file.value):
            for pods in workload.kinds:
                for container in pods.containers:
                    yield from _of_environment(file, workload, pods, container)


def _of_environment(file: File, workload: Workload, pods: Pods, container: Container) -> Iterator[Point]:
    texts = ((path, entry) for path, entry in container.environment if isinstance(entry.get("value"), str))
    values = {str(entry.get("name")): (path, entry["value"]) for path, entry in texts}
    port = next((_number(values[name][1]) for name in _PORTS if name in values), None)
    for name in (*_ADDRESSES, *_ENDPOINTS):
        if name in values and is_told(values[name][1]):
            path, value = values[name]
            host, _, own = value.partition(":") if name in _ENDPOINTS else (value, "", "")
            at = file.at(*path, "value")
            yield Point(file, workload, pods, at, host, _number(own) or port, name == "MASTER_ADDR")


def _of_options(files: FileSet) -> Iterator[Point]:
    """What torchrun's options say, but those that a variable of the pod fills."""
    for workload, container, inner in of_containers(files):
        pods = next(each for each in workload.kinds if container in each.containers)
        for launch in inner.file.value.launches:
            torchrun = launch.launcher("torchrun")
            variables = {str(entry.get("name")): entry.get("value") for _, entry in container.environment}
            address = _filled(torchrun, "master-addr", variables) if torchrun else None
            endpoint = _filled(torchrun, "rdzv-endpoint", variables) if torchrun else None
            host, _, own = (endpoint or "").partition(":")
            host = address or host
            said = [variables.get(name, "") for name in (*_ADDRESSES, *_ENDPOINTS)]
            if torchrun is None or not host or host in said or endpoint in said:
                continue
            port = _number(own) if address is None else _number(option(torchrun, "master-port") or "29500")
            name = "--rdzv-endpoint" if address is None else "--master-addr"
            spelled = (name, f"--{name[2:].replace('-', '_')}")
            here = Hit(inner.file.name, torchrun.options.position(*spelled), "", "")
            for found in inner.at_home(here):
                yield Point(inner.outer, workload, pods, found.at or torchrun.at, host, port, False)


def _filled(torchrun: Launcher, name: str, variables: Mapping[str, object]) -> str | None:
    """The value of an option, with the container's variables in it; None where it isn't told."""
    value = torchrun.options.value(f"--{name}", f"--{name.replace('-', '_')}")
    if value is None:
        return None
    for found in _VARIABLE.finditer(value):
        held = variables.get(found[1] or found[2] or found[3])
        value = value.replace(found[0], held) if isinstance(held, str) else value
    return value if is_told(value) else None


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 6 else None


def _judged(point: Point, services: list[Service], everyone: list[tuple[Workload, Pods]]) -> Iterator[Fault]:
    workload, host, count = point.workload, point.host.strip(), point.workload.count
    if workload.kind == "PyTorchJob":
        yield from _of_operator(point)
    elif _LOCAL.fullmatch(host):
        if (count or 1) > 1 and workload.kind not in ("Deployment", "ReplicaSet", "MPIJob"):
            message = f"MASTER_ADDR={host} is each of the {count} pods itself: they never meet."
            yield message, "Name the first pod: JOB-0.SERVICE, with a headless Service.", "hang"
    elif host and is_told(host) and not _NUMERIC.fullmatch(host) and workload.kind != "MPIJob":
        yield from _of_name(point, host.split("."), services, everyone)


def _of_operator(point: Point) -> Iterator[Fault]:
    workload = point.workload
    if point.of_variable and any(pods.role == "Master" for pods in workload.pods):
        message = f"MASTER_ADDR={point.host} isn't used: the operator of PyTorchJob adds its own behind it."
        yield message, "Leave it out.", "info"
    elif _LOCAL.fullmatch(point.host) and (workload.count or 1) > 1:
        message = f"{point.host} is each of the {workload.count} pods itself: they never meet."
        yield message, "Leave it out: the operator says where to meet.", "hang"
    elif (found := _OF_OPERATOR.fullmatch(point.host.partition(".")[0])) and is_told(workload.name):
        if why := _without_dns(point.pods):
            yield _unknown_to(point.host, why)
            return
        roles = {pods.role.lower() for pods in workload.pods}
        if workload.name and found["job"] != workload.name:
            message = f"{point.host} is a pod of another job: this one's are called {workload.name}-ROLE-N."
            yield message, "Leave it out: the operator says where to meet.", "hang"
        elif found["role"] not in roles:
            message = f"{point.host}: this job has no {found['role'].title()}."
            yield message, "Leave it out: the operator says where to meet.", "hang"


def _of_name(
    point: Point, parts: list[str], services: list[Service], everyone: list[tuple[Workload, Pods]]
) -> Iterator[Fault]:
    workload, pods = point.workload, point.pods
    named = [each for each in services if each.name == parts[0]]
    behind = next((each for each in services if len(parts) > 1 and each.name == parts[1]), None)
    own = pod_names(workload, pods)
    domain = domain_of(workload, pods)
    alone = len(parts) == 1 or parts[1] == "svc"
    of_cluster = named or behind or (len(parts) > 1 and parts[1] == domain) or "svc" in parts
    if of_cluster and (why := _without_dns(pods)):
        yield _unknown_to(point.host, why)
        return
    if named and (alone or parts[1] == named[0].namespace or len(parts) > 2):
        yield from _of_service(point, named[0], parts, everyone)
    elif parts[0] in own and alone and workload.kind in ("Job", "JobSet", "StatefulSet", "Pod", "LeaderWorkerSet"):
        where = domain or "SERVICE"
        message = f"{parts[0]} alone is no name in DNS: a pod has one below its headless Service."
        yield message, f"Write {parts[0]}.{where}, with a headless Service of that name.", "hang"
    elif parts[0] in own and len(parts) > 1:
        yield from _of_pod(point, parts, domain, services)
    elif own and len(parts) > 1 and (parts[1] == domain or (behind is not None and behind.selects(pods))):
        if any(parts[0] in pod_names(*each) for each in everyone):
            return
        first = min(own, key=lambda name: (len(name), name))
        if workload.kind in ("JobSet", "LeaderWorkerSet") or nearest(parts[0], own):
            message = f"no pod is called {parts[0]}: those behind {parts[1]} are {first} and so on."
            yield message, f"Write {first}.{parts[1]}.", "hang"


def _without_dns(pods: Pods) -> str:
    """Why pods don't ask the cluster's DNS; empty where they do."""
    policy, shared = pods.spec.get("dnsPolicy", "ClusterFirst"), pods.spec.get("hostNetwork") is True
    if shared and policy in ("ClusterFirst", "Default"):
        return "hostNetwork"
    return "dnsPolicy: Default" if policy == "Default" else ""


def _unknown_to(host: str, why: str) -> Fault:
    message = f"{host} is a name of the cluster's DNS, which pods with {why} don't ask."
    return message, "Add dnsPolicy: ClusterFirstWithHostNet to the pods.", "hang"


def _of_pod(point: Point, parts: list[str], domain: str, services: list[Service]) -> Iterator[Fault]:
    """`POD.SERVICE[.NAMESPACE...]`, of a pod that there is."""
    pods, workload = point.pods, point.workload
    if not domain:
        if workload.kind in ("Job", "Pod"):
            message = f"{point.host} is a name only where the pods have that subdomain: they look for it in vain."
            fix = f"Add subdomain: {parts[1]} to the pods, and a headless Service of that name."
            yield message, fix, "hang"
        return
    if is_told(domain) and parts[1] != domain:
        message, fix = f"{point.host}: the pods have their names below {domain}", f"Write {parts[0]}.{domain}."
        known = {each.name for each in services}
        if parts[1] in known and domain not in known:
            key = "serviceName" if workload.kind == "StatefulSet" else "subdomain"
            message, fix = f"{message}, and no Service is called so", f"Write {key}: {parts[1]}."
        yield f"{message}.", fix, "hang"
        return
    if len(parts) > 2 and workload.namespace and parts[2] not in (workload.namespace, "svc"):
        yield f"{point.host}: the pods run in {workload.namespace}.", "Write that namespace, or none.", "hang"
        return
    if workload.kind == "Pod" and not pods.spec.get("hostname"):
        message = f"{point.host}: a Pod has a name below its Service where hostname says it, which is missing."
        yield message, f"Add hostname: {parts[0]} to the Pod's spec.", "hang"
        return
    service = next((each for each in services if each.name == domain), None)
    if service is None:
        meant = [each for each in services if each.headless and each.selects(pods) and each.file is point.file]
        if meant and workload.kind in ("Job", "Pod", "StatefulSet"):
            other = meant[0].name
            message = f"no Service is called {domain} here, and {other} selects these pods."
            yield message, f"Call the Service {domain}, or write {other} as the pods' subdomain.", "hang"
        return
    elif service.selects(pods) is False:
        message = f"the Service {domain} selects {_shown(service.selector)}, which these pods aren't: no names."
        yield message, "Give Service and pods the same labels.", "hang"
    elif not service.headless:
        message = f"the Service {domain} has an address of its own: its pods have no names in DNS."
        yield message, "Add clusterIP: None to the Service.", "hang"
    elif service.namespace and workload.namespace and service.namespace != workload.namespace:
        both = f"the Service {domain} is of {service.namespace}, and the pods of {workload.namespace}"
        message = f"{both}: they have no names."
        yield message, "Put both into one namespace.", "hang"
    elif not service.early and any("readinessProbe" in each.value for each in pods.containers):
        message = f"{point.host} is a name once the pod is ready, and it gets ready once all have met."
        yield message, "Add publishNotReadyAddresses: true to the Service.", "hang"


def _of_service(
    point: Point, service: Service, parts: list[str], everyone: list[tuple[Workload, Pods]]
) -> Iterator[Fault]:
    """`SERVICE[.NAMESPACE...]`."""
    workload, port = point.workload, point.port
    named = parts[1] if len(parts) > 1 and parts[1] != "svc" else workload.namespace
    if service.namespace and named and service.namespace != named:
        message = f"the Service {service.name} is of {service.namespace}, and is looked for in {named}."
        yield message, f"Write {service.name}.{service.namespace}.", "hang"
        return
    chosen = [(each, pods) for each, pods in everyone if service.selects(pods) is not False]
    if service.selector and not chosen and all(is_told(str(each)) for each in service.selector.values()):
        message = f"the Service {service.name} selects {_shown(service.selector)}, and no pod here is that."
        yield message, "Give Service and pods the same labels.", "hang"
        return
    certain = [(each, pods) for each, pods in everyone if service.selects(pods) and each.value is workload.value]
    several = [pods for _, pods in certain if (pods.count or 1) > 1]
    if several:
        message = f"{service.name} stands for {several[0].count} pods alike: each asks any of them for the first."
        yield message, "Name the first pod: POD-0.SERVICE, with a headless Service.", "hang"
    elif not service.headless and port is not None and service.ports:
        target = next((target for number, target in service.ports if number == port), None)
        if target is None:
            has = ", ".join(str(number) for number, _ in service.ports)
            message = f"the Service {service.name} hands on port {has}, and they meet at {port}."
            yield message, f"Add port {port} to the Service, or make it headless (clusterIP: None).", "hang"
        elif type(target) is int and target != port:
            message = f"the Service {service.name} hands {port} on to {target}, where nobody listens."
            yield message, f"Write targetPort: {port}.", "hang"


def _shown(selector: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in selector.items())
