"""Where the ranks of a component stand, which samples each replica owns, and in which micro-batch.

Samples of one optimizer step are numbered 0..N-1, the same for every layout. Pure arithmetic, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dslaunch.planfile import ComponentPlan


@dataclass(frozen=True)
class Place:
    """A rank's coordinates in a grid."""

    stage: int
    """Which of the pipeline's pp groups of ranks."""
    replica: int
    """Data-parallel index."""
    shard: int
    """Tensor-parallel index."""


@dataclass(frozen=True)
class Grid:
    """rank = offset + shard + tp * (replica + dp * stage): Megatron's tp-dp-pp, DeepSpeed's pipe-data-model.

    With vpp > 1 the pipeline has pp * vpp stages, and passes over the groups of ranks vpp times: stage s stands on
    group s % pp.
    """

    tp: int
    dp: int
    pp: int
    offset: int
    vpp: int = 1

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    @property
    def size(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def ranks(self) -> range:
        return range(self.offset, self.offset + self.size)

    def rank(self, stage: int, replica: int, shard: int) -> int:
        return self.offset + shard + self.tp * (replica + self.dp * (stage % self.pp))

    def stages_at(self, place: Place) -> range:
        """The stages that a rank holds."""
        return range(place.stage, self.stages, self.pp)

    def place(self, rank: int) -> Place | None:
        """The coordinates of `rank`; None where it is not of this grid."""
        if rank not in self.ranks:
            return None
        rest, shard = divmod(rank - self.offset, self.tp)
        stage, replica = divmod(rest, self.dp)
        return Place(stage, replica, shard)

    def stage_ranks(self, stage: int) -> list[int]:
        first = self.offset + stage % self.pp * self.tp * self.dp
        return list(range(first, first + self.tp * self.dp))


def grid_of(layout: ComponentPlan) -> Grid:
    return Grid(layout.tp, layout.dp, layout.pp, layout.rank_offset, layout.vpp)


@dataclass(frozen=True)
class Shares:
    """Which samples of a step a component's replicas own.

    The trunk's replica d owns [N*d/D, N*(d+1)/D), its micro-batch m the m-th block of them. A round is as many
    of the trunk's micro-batches as are fed together; its samples, in order, are shared out alike by every
    other component. With one round that is the same formula for all: an interval for each replica.
    """

    samples: int
    """N, the global batch."""
    trunk_dp: int
    dp: int
    micro_batches: int
    """Of one replica in a step."""
    rounds: int
    """Rounds in a step; each component's micro_batches is a multiple of it."""

    @property
    def per_round(self) -> int:
        return self.micro_batches // self.rounds

    def of(self, replica: int, index: int) -> tuple[int, ...]:
        """The samples of micro-batch `index` of `replica`, ascending."""
        which, within = divmod(index, self.per_round)
        size = self.samples // self.dp // self.micro_batches
        start = size * (self.per_round * replica + within)
        return tuple(self._in_round(which, position) for position in range(start, start + size))

    def _in_round(self, which: int, position: int) -> int:
        """The sample at `position` of round `which`: the trunk's replicas one after another."""
        per_replica = self.samples // self.trunk_dp
        per_round = per_replica // self.rounds
        replica, within = divmod(position, per_round)
        return replica * per_replica + which * per_round + within

    @cached_property
    def owners(self) -> dict[int, tuple[int, int]]:
        """(replica, micro-batch) by sample."""
        return {
            sample: (replica, index)
            for replica in range(self.dp)
            for index in range(self.micro_batches)
            for sample in self.of(replica, index)
        }
