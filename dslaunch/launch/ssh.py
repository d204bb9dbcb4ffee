"""On several hosts over ssh, through DeepSpeed's own multi-node runner."""

from __future__ import annotations

from pathlib import Path

from dslaunch.errors import ConfigError
from dslaunch.launch.hostfile import check_hosts, parse_hostfile
from dslaunch.launch.local import head_node
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.steps import Step


def prepare(request: LaunchRequest) -> list[Step]:
    """launch.sh with the hostfile, supervised here.

    Raises:
        ConfigError: no hostfile, or one that does not fit the plan.
    """
    cluster = request.plan.cluster
    where = request.plan.launcher.hostfile or "hostfile"
    hosts = parse_hostfile(_text(request), where)
    check_hosts(hosts, cluster.nodes, cluster.gpus_per_node, where)
    variables = {"DSLAUNCH_RUNNER": "deepspeed", "DSLAUNCH_HOSTFILE": request.hostfile}
    return [head_node(request, variables, local_python=False, ranks=None)]


def _text(request: LaunchRequest) -> str:
    if not request.plan.launcher.hostfile:
        if "hostfile" not in request.files:
            raise ConfigError(
                "launcher.name=ssh: no host is named. Give launcher.hostfile=FILE (lines of `HOST slots=N`), or "
                "cluster.hosts=[HOST,...] when the files are rendered"
            )
        return request.files["hostfile"]
    try:
        return Path(request.hostfile).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"launcher.hostfile: {request.hostfile} cannot be read: {error}. Its lines are `HOST slots=N`"
        ) from error
