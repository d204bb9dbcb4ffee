"""On several hosts over ssh: with an agent of ours on each, or through DeepSpeed's own runner and pdsh."""

from __future__ import annotations

import sys
from dataclasses import replace

from dslaunch.launch.hosts import host_words
from dslaunch.launch.local import head_node
from dslaunch.launch.remote_job import HOSTS
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.stage import stage_step, work_folder
from dslaunch.launch.steps import Execute, Step


def prepare(request: LaunchRequest) -> list[Step]:
    """The launch over ssh, supervised here.

    Raises:
        ConfigError: no hostfile, or one that does not fit the plan.
    """
    pdsh = request.plan.launcher.transport == "pdsh"
    started = _over_pdsh(request) if pdsh else _with_agents(request)
    staged = stage_step(request)
    if staged is None:
        return [started]
    return [staged, replace(started, env={**started.env, "DSLAUNCH_WORK_DIR": work_folder(request)})]


def _with_agents(request: LaunchRequest) -> Execute:
    runner = request.plan.launcher.runner
    return Execute(
        argv=(sys.executable, "-m", "dslaunch.launch.remote"),
        cwd=request.run_dir,
        env={
            **request.variables(local_python=False),
            "DSLAUNCH_RUNNER": "direct" if runner == "auto" else runner,
            "DSLAUNCH_HOSTS": host_words(request),
        },
        log=request.logs / "launcher.log",
        ranks=request.plan.world_size if "/ranks" in request.files.get("rank.sh", "") else None,
    )


def _over_pdsh(request: LaunchRequest) -> Execute:
    variables = {
        "DSLAUNCH_RUNNER": "deepspeed",
        "DSLAUNCH_HOSTFILE": str(request.run_dir / HOSTS),
        "DSLAUNCH_HOSTS": host_words(request),
    }
    step = head_node(request, variables, local_python=False, ranks=None)
    return replace(step, argv=(sys.executable, "-m", "dslaunch.launch.swept", "shielded", *step.argv))
