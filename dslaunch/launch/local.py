"""On this machine, through DeepSpeed's runner or torchrun."""

from __future__ import annotations

from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.steps import Execute, Step


def prepare(request: LaunchRequest) -> list[Step]:
    """launch.sh, supervised here."""
    runner = request.plan.launcher.runner
    return [on_this_machine(request, runner="deepspeed" if runner == "auto" else runner)]


def on_this_machine(request: LaunchRequest, runner: str) -> Execute:
    """launch.sh of a single node under `runner`: deepspeed or torchrun."""
    return head_node(
        request,
        {"DSLAUNCH_RUNNER": runner, "DSLAUNCH_NODE_RANK": "0", "DSLAUNCH_MASTER_ADDR": "127.0.0.1"},
        local_python=True,
        ranks=request.plan.world_size if "/ranks" in request.files.get("rank.sh", "") else None,
    )


def head_node(
    request: LaunchRequest, variables: dict[str, str], *, local_python: bool, ranks: int | None
) -> Execute:
    """launch.sh with the launcher's own `variables`, and the port of the rendezvous."""
    port = request.plan.launcher.master_port
    fixed = {"DSLAUNCH_MASTER_PORT": str(port)} if port else {}
    return Execute(
        argv=("bash", "launch.sh"),
        cwd=request.run_dir,
        env={**request.variables(local_python=local_python), **variables, **fixed},
        log=request.logs / "launcher.log",
        free_port="" if port else "DSLAUNCH_MASTER_PORT",
        ranks=ranks,
    )
