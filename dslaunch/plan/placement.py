"""Where SLURM is to place a job's nodes, in the words that a plan shows.

--switches and --reservation are of sbatch(1) since long; --segment came with the plugin topology/block (23.11) in
24.05: a segment's nodes stand in one block, and blocks are what NVLink joins in racks such as GB200 NVL72's.
"""

from __future__ import annotations

from dslaunch.schema.cluster import Slots
from dslaunch.schema.config import RunConfig


def placement(config: RunConfig) -> tuple[str, ...]:
    """`OPTION: what it means here`, a line each; none where nothing is asked for."""
    slurm, cluster = config.launcher.slurm, config.cluster
    lines = []
    if slurm.switches:
        leaves, _, wait = slurm.switches.partition("@")
        waits = f", or after {wait} on more" if wait else ""
        lines.append(f"--switches={slurm.switches}: nodes under {leaves} leaf switches{waits}")
    if slurm.segment:
        gpus, domain = slurm.segment * cluster.slots, cluster.node.nvlink_domain
        block = f"every {gpus} ranks stand in one block, such as an NVLink domain of {domain} GPUs"
        lines.append(f"--segment={slurm.segment}: {block} (SLURM 24.05 or later, topology/block)")
    if slurm.reservation:
        lines.append(f"--reservation={slurm.reservation}: its nodes alone")
    if slurm.rank_order == "switches" and not cluster.switches:
        lines.append("--distribution=arbitrary: ranks fill one leaf switch after the other, by SLURM's topology")
    if cluster.kinds and config.launcher.name in ("auto", "slurm"):
        kinds = ", then ".join(_kind(each) for each in cluster.kinds)
        lines.append(f"#SBATCH hetjob: one job of {len(cluster.kinds)} components, ranks on {kinds}")
    return tuple(lines)


def _kind(kind: Slots) -> str:
    where = f" in {kind.partition}" if kind.partition else ""
    which = f" with {kind.constraint}" if kind.constraint else ""
    return f"{kind.nodes} node{'s' if kind.nodes > 1 else ''} x {kind.gpus} GPUs{where}{which}"
