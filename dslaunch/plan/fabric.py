"""What the cluster's fabrics call for in the ranks' environment."""

from __future__ import annotations

from dslaunch.errors import ConfigError, listed, nearest
from dslaunch.planfile.plan import FabricVariable
from dslaunch.schema.config import RunConfig

_AUTO, _NONE = "auto", "none"


def fabric_variables(config: RunConfig) -> tuple[FabricVariable, ...]:
    """By name; without those that the user sets in env, and none on CPU ranks.

    Raises:
        ConfigError: cluster.fabric names a fabric of which there is no file.
    """
    found: dict[str, FabricVariable] = {}
    for fabric in _fabrics(config):
        for name, setting in config.fabrics[fabric].items():
            network = config.cluster.network
            slow = network is not None and network.gb_per_s < setting.from_gb_per_s
            if not slow and config.cluster.world_size >= setting.from_gpus and name not in config.env:
                found[name] = FabricVariable(name, setting.value, fabric, setting.reason, setting.source)
    return tuple(found[name] for name in sorted(found))


def _fabrics(config: RunConfig) -> list[str]:
    """Names of the fabrics between the nodes; a kind of link of which there is no file calls for nothing."""
    cluster, known = config.cluster, config.fabrics
    if cluster.fabric not in (_AUTO, _NONE, *known):
        raise ConfigError(
            f"cluster.fabric is {cluster.fabric}: there is no conf/fabric/{cluster.fabric}.yaml. Allowed are "
            f"auto, none, {listed(sorted(known))}.{nearest(cluster.fabric, known)}"
        )
    if cluster.gpu.accelerator == "cpu" or cluster.node_count == 1 or cluster.fabric == _NONE:
        return []
    between = cluster.network.kind if cluster.fabric == _AUTO and cluster.network else cluster.fabric
    rack = ["mnnvl"] if cluster.node.nvlink_domain > cluster.node.gpus else []
    return [name for name in (between, *rack) if name in known]
