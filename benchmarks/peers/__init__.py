"""Other tools that predict memory or time, run on the same records: one file each.

Those that no package index has are read from checkouts in the folder that DSLAUNCH_PEERS names.
"""

from __future__ import annotations

from benchmarks.peers import calculon, deepspeed_estimators, llm_analysis, megatron_script, simumax
from benchmarks.peers.base import Peer


def peers() -> list[Peer]:
    """Every peer, those that can't run here with the reason."""
    modules = (simumax, calculon, llm_analysis, megatron_script, deepspeed_estimators)
    return [Peer(module.NAME, module.missing(), module.estimate) for module in modules]
