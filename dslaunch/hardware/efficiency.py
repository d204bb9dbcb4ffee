"""Shares of peak figures that real programs reach. Data, handed to the plan as an argument."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Efficiency:
    """Shares between 0 and 1 of the figure in the cluster file."""

    matrix: float = 0.62
    """Of the dense peak, in large matrix products: Megatron-LM reached 57 % of the A100's peak over whole
    steps of a 1T model with bubbles and communication in it (arXiv:2104.04473, table 1)."""
    hbm: float = 0.8
    link: float = 0.75
    """Of a link's one-way bandwidth, in large collectives."""
    pcie: float = 0.8
    host_adam_gb_per_s: float = 50.0
    """Host memory traffic of a CPU optimizer, GB/s per rank."""

    def sha256(self) -> str:
        """Hash of the figures, for the prediction's record."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


UNCALIBRATED = Efficiency()
"""Round figures from publications; not fitted to anything."""
