"""A cluster's file with the bandwidths that were measured, for plans from then on."""

from __future__ import annotations

from pathlib import Path

import yaml

from dslaunch.errors import ConfigError
from dslaunch.hardware.efficiency import SHIPPED
from dslaunch.preflight.measuring import Measured
from dslaunch.preflight.target import Target
from dslaunch.run.folder import write_file
from dslaunch.schema.cluster import Cluster

_GB = 1e9
_BOUND = 0.95
"""Above this share of a host's own bandwidth all ranks together are bound by the hosts, not by the network."""


def write_profile(path: Path, base: str, cluster: Cluster, measured: Measured, target: Target) -> None:
    """Write a file that builds on the cluster `base`.

    Plans expect collectives to reach a share of a cluster file's figures. The figures are written so that this
    share of them is what was measured.

    Raises:
        ConfigError: nothing was measured, or the file cannot be written.
    """
    within, across = measured.within_bytes_per_s, measured.across_bytes_per_s
    if within is None and across is None:
        raise ConfigError(
            f"--output {path}: no bandwidth was measured, so nothing is written. See what preflight says of the "
            "collective"
        )
    rates, ranks = SHIPPED.gpu(cluster.gpu), target.plan.cluster.gpus_per_node
    data: dict[str, object] = {"defaults": [base, "_self_"]}
    said = f"measured by dslaunch preflight on {len(target.hosts)} hosts x {ranks} ranks: all_reduce"
    if within is not None:
        data["intra"] = {"gb_per_s": _rounded(within / rates.link), "source": f"{said} within a host"}
    if across is not None and (within is None or across < _BOUND * within):
        speed = _rounded(across / ranks / rates.network)
        data["network"] = {"gb_per_s": speed, "source": f"{said} over all ranks"}
    write_file(path, yaml.safe_dump(data, sort_keys=False, width=110))


def _rounded(bytes_per_s: float) -> float:
    return float(f"{bytes_per_s / _GB:.3g}")
