"""Through torchrun: on this machine, or on one node of several where the user types the command on each."""

from __future__ import annotations

from dslaunch.errors import ConfigError
from dslaunch.launch.local import head_node, on_this_machine
from dslaunch.launch.request import LaunchRequest
from dslaunch.launch.steps import Step


def prepare(request: LaunchRequest) -> list[Step]:
    """launch.sh, supervised here.

    Raises:
        ConfigError: several nodes, and it is not said which one this is.
    """
    nodes = request.plan.cluster.nodes
    if nodes == 1:
        return [on_this_machine(request, runner="torchrun")]
    rank, address = (request.environ.get(f"DSLAUNCH_{name}", "") for name in ("NODE_RANK", "MASTER_ADDR"))
    port = request.plan.launcher.master_port
    if rank not in {str(node) for node in range(nodes)} or not address or not port:
        raise ConfigError(
            f"launcher.name=torchrun: the plan has {nodes} nodes, and torchrun starts the ranks of one. Give "
            "launcher.master_port=PORT, and on each node type `DSLAUNCH_NODE_RANK=K DSLAUNCH_MASTER_ADDR=HOST "
            f"dslaunch ...` (K from 0 to {nodes - 1}, HOST the first node; found are rank {rank!r}, address "
            f"{address!r}, port {port}); or use launcher=slurm or launcher=ssh"
        )
    variables = {"DSLAUNCH_RUNNER": "torchrun", "DSLAUNCH_NODE_RANK": rank, "DSLAUNCH_MASTER_ADDR": address}
    return [head_node(request, variables, local_python=True, ranks=None)]
