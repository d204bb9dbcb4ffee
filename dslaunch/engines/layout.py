"""What an engine is asked to execute: the degrees of parallelism of one component, and where its ranks stand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """One component's layout. Rank = offset + tp_i + TP * (cp_i + CP * (dp_i + DP * pp_i))."""

    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    dp: int
    zero: int
    offload: str
    recompute: str
    micro_batch: int
    num_microbatches: int
    rank_offset: int
    layers_per_stage: tuple[int, ...]
    expert_tp: int | None = None
    """Tensor-parallel ranks that share an expert, where they are not tp."""
    shard_size: int | None = None
    """Ranks that share one copy of the states, where it is fewer than all replicas (HSDP)."""

    @property
    def ranks(self) -> int:
        """Ranks that the grid spans."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def etp(self) -> int:
        """Tensor-parallel ranks that share an expert."""
        return self.expert_tp or self.tp

    @property
    def shard(self) -> int:
        """Ranks over which states are sharded: data- and context-parallel ones together, or fewer."""
        return self.shard_size or self.dp * self.cp

    @property
    def expert_shard(self) -> int:
        """Ranks over which the states of a routed expert are sharded: those of a stage that hold the same part."""
        return max(1, self.shard * self.tp // (self.ep * self.etp))

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Global ranks of one pipeline stage."""
        per_stage = self.ranks // self.pp
        first = self.rank_offset + stage * per_stage
        return tuple(range(first, first + per_stage))

    def describe(self) -> str:
        """In words, such as `TP8 PP4 DP2 ZeRO-1 recompute full`."""
        extra = "".join(f" {n}{v}" for n, v in (("VPP", self.vpp), ("CP", self.cp), ("EP", self.ep)) if v > 1)
        extra += f" ETP{self.expert_tp}" if self.expert_tp else ""
        tail = "" if self.recompute == "none" else f" recompute {self.recompute}"
        tail += "" if self.offload == "none" else f" offload {self.offload}"
        return f"TP{self.tp} PP{self.pp}{extra} DP{self.dp} ZeRO-{self.zero}{tail}"
