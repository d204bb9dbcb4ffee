"""Through SLURM: sbatch, or the same job script run in the allocation that the shell is already in."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from dslaunch.errors import ConfigError
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.steps import Execute, Follow, Step, Submit

SHELL_NAMES = (
    "HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LC_ALL", "LC_CTYPE",
    "SLURM_CONF", "MODULEPATH", "MODULESHOME", "LMOD_CMD", "LMOD_DIR", "LMOD_PKG", "BASH_ENV",
)  # fmt: skip
"""What a job takes over from the launching shell beside launcher.pass_env: where things are, and `module`."""

_JOB_NAMES = (
    "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NUM_NODES",
    "SLURM_NNODES", "SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION",
    "SLURM_JOB_ACCOUNT", "SLURM_JOB_QOS", "SLURM_JOB_UID", "SLURM_JOB_GID", "SLURM_JOB_USER", "SLURM_JOB_GPUS",
    "SLURM_JOB_END_TIME", "SLURM_JOB_START_TIME", "SLURM_CLUSTER_NAME", "SLURM_CONF", "SLURM_SUBMIT_DIR",
    "SLURM_SUBMIT_HOST", "SLURM_WORKING_CLUSTER", "SLURM_HET_SIZE",
)  # fmt: skip
"""What describes the allocation. The other SLURM_* are options, or a step's, and would mislead the srun."""
_COMPONENT = re.compile(r"_HET_GROUP_\d+$")
"""Ends the name of what describes one component of a heterogeneous job."""


def prepare(request: LaunchRequest) -> list[Step]:
    """Submit the job, and follow it where that is asked for; inside an allocation run it there.

    Raises:
        ConfigError: an allocation of another size.
    """
    if request.inside_allocation:
        return [_in_allocation(request)]
    submit = submission(request)
    return [submit, Follow(request.run_dir)] if request.wait else [submit]


def submission(request: LaunchRequest) -> Submit:
    """The run as a job of its own."""
    run_dir = str(request.run_dir)
    log = f"{run_dir.replace('%', '%%')}/logs/slurm-%j.out"
    passed = [name for name in SHELL_NAMES if name in request.environ]
    return Submit(
        argv=("sbatch", "--parsable", "--chdir", run_dir, "--output", log, "--export=ALL", "job.sbatch"),
        cwd=request.run_dir,
        env=_submitted(request),
        passed=tuple(dict.fromkeys([*passed, *request.plan.launcher.pass_env, *_webhook(request)])),
        fresh=request.attempt == 1,
        continuations=request.plan.launcher.continuations,
    )


def _webhook(request: LaunchRequest) -> list[str]:
    """The variable that the job's supervisor sends its messages by."""
    name = request.plan.supervision.webhook
    return [name] if name else []


def _variables(request: LaunchRequest) -> dict[str, str]:
    """With the Python of this dslaunch, which the job asks its nodes with."""
    ours = {"DSLAUNCH_PREFLIGHT": sys.executable} if request.preflight else {}
    return {**request.variables(local_python=False), **ours}


def _submitted(request: LaunchRequest) -> dict[str, str]:
    """With the same Python to watch over the job; in an allocation of the user's this process does."""
    return {**_variables(request), "DSLAUNCH_SUPERVISOR": sys.executable}


def _in_allocation(request: LaunchRequest) -> Execute:
    has, wanted = _allocated(request.environ), request.plan.cluster.kinds or (request.plan.cluster.nodes,)
    if has != tuple(map(str, wanted)):
        several = f" in {len(wanted)} components" if len(wanted) > 1 else ""
        raise ConfigError(
            f"launcher.name=slurm: allocation {request.environ['SLURM_JOB_ID']} has {' + '.join(has)} nodes, "
            f"the plan {' + '.join(map(str, wanted))}{several}. Plan for this allocation, or launch outside of it"
        )
    return Execute(
        argv=("bash", "job.sbatch"),
        cwd=request.run_dir,
        # The allocation is the user's own: it is not put back into the queue.
        env={**_variables(request), "DSLAUNCH_REQUEUE": "0", "DSLAUNCH_SUPERVISOR": ""},
        log=request.logs / "launcher.log",
        unset=tuple(sorted(n for n in request.environ if n.startswith("SLURM") and not _describes(n))),
    )


def _allocated(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Nodes of the allocation; of a heterogeneous one, those of each component."""
    count = int(environ.get("SLURM_HET_SIZE", "0"))
    names = [f"SLURM_JOB_NUM_NODES_HET_GROUP_{at}" for at in range(count)] or ["SLURM_JOB_NUM_NODES"]
    return tuple(environ.get(name) or "unknown" for name in names)


def _describes(name: str) -> bool:
    return _COMPONENT.sub("", name) in _JOB_NAMES
