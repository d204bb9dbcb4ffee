"""On several hosts through Open MPI's mpirun: a process a rank, told its place by `rank.sh openmpi`."""

from __future__ import annotations

import sys

from dslaunch.launch.hosts import host_words, hosts_of
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.steps import Execute, Step


def prepare(request: LaunchRequest) -> list[Step]:
    """mpirun, supervised here.

    Raises:
        ConfigError: no hostfile, or one that does not fit the plan.
    """
    hosts, plan = hosts_of(request), request.plan
    variables = request.variables(local_python=False)
    port = plan.launcher.master_port
    master = {"MASTER_ADDR": hosts[0].split("@")[-1], **({"MASTER_PORT": str(port)} if port else {})}
    attempt = {"DSLAUNCH_ATTEMPT": str(request.attempt)}  # a restart counts on
    names = [*variables, *attempt, "MASTER_ADDR", "MASTER_PORT", *plan.launcher.pass_env]
    return [
        Execute(
            argv=(
                *(sys.executable, "-m", "dslaunch.launch.swept", "open", "mpirun"),
                *("--host", ",".join(f"{host}:{plan.cluster.gpus_per_node}" for host in hosts)),
                *("-n", str(plan.world_size), "--map-by", f"ppr:{plan.cluster.gpus_per_node}:node"),
                # Bound to one core, as mpirun would have it, a rank's threads and data loaders share that core.
                *("--bind-to", "none", "--tag-output"),
                *(word for name in dict.fromkeys(names) for word in ("-x", name)),
                *("bash", str(request.run_dir / "rank.sh"), "openmpi"),
            ),
            cwd=request.run_dir,
            env={
                **attempt,
                **variables,
                **master,
                "DSLAUNCH_RUNNER": "direct",
                "DSLAUNCH_HOSTS": host_words(request),
            },
            log=request.logs / "launcher.log",
            free_port="" if port else "MASTER_PORT",
        )
    ]
