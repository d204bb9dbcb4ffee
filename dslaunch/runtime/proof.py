"""The first step proves that the training is distributed as the plan says; a job that is not ends there.

After it, replicas hold equal parameters, ranks that share a gradient norm have the same, and each rank holds the
bytes of weights and optimizer states that the ledger reckoned with. `pace` holds the next steps to their time.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dslaunch.planfile import Plan, Prediction, prediction_from_json
from dslaunch.runtime.coupled import guests_of
from dslaunch.runtime.grid import grid_of
from dslaunch.runtime.held import Held
from dslaunch.runtime.world import World

NORM_TOLERANCE = 1e-5
"""Relative, between ranks that computed a norm apart from the same sums."""
BYTES_TOLERANCE = 0.1
"""By which a rank may hold more than the ledger says: two replicas that shard nothing hold a fifth more."""
SLACK = 2**16
"""Bytes by which a component may be larger on a rank besides: small models feel what is rounded up."""
_CHUNK = 2**22
_GIB = 2**30


class NotDistributedError(Exception):
    """What ranks hold is not what the plan says; the same on every rank."""


@dataclass(frozen=True)
class Copy:
    """A parameter that a rank computes with."""

    name: str
    where: str
    """Ranks with the same name and `where` hold equal values, such as `shard 1`."""
    tensor: Tensor


class Proved(Protocol):
    """What an engine tells for the proof."""

    def held(self, anew: bool = False) -> Iterator[Held]: ...

    def copies(self) -> Iterator[Copy]:
        """What this rank computes with, but for what FSDP has cut."""
        ...

    def norms(self) -> Mapping[str, float]:
        """Gradient norms of the last step by what they are of, each as this rank computed it."""
        ...


@dataclass(frozen=True)
class Witness:
    """What one rank tells."""

    rank: int
    hashes: dict[tuple[str, str], int]
    norms: dict[str, float]
    bytes: dict[str, int]
    """Of weights and optimizer states, by component."""


def prove(engine: Proved, plan: Plan, world: World, prediction: Prediction | None) -> str:
    """What was found, in a line; every rank calls it behind the first step.

    Raises:
        NotDistributedError: on every rank alike, with ranks, component and parameter.
    """
    own = Witness(world.rank, _hashes(engine.copies()), dict(engine.norms()), _bytes(engine))
    told: list[Any] | None = [None] * world.size if world.rank == 0 else None
    dist.gather_object(own, told)
    verdict: list[Any] = [None]
    if told is not None:
        verdict = [_judged(told, plan, prediction)]
    dist.broadcast_object_list(verdict)
    faults, line = verdict[0]
    if faults:
        raise NotDistributedError("\n".join(("after the first step", *(f"  {fault}" for fault in faults))))
    return str(line)


def read_prediction(plan_path: Path) -> Prediction | None:
    """What `dslaunch render` predicted of this very plan, where it stands beside it."""
    path = plan_path.parent / "prediction.json"
    if not path.is_file():
        return None
    prediction = prediction_from_json(path.read_text(encoding="utf-8"), str(path))
    return prediction if prediction.plan_sha256 == hashlib.sha256(plan_path.read_bytes()).hexdigest() else None


def _judged(told: list[Witness], plan: Plan, prediction: Prediction | None) -> tuple[list[str], str]:
    faults = [*_unequal_parameters(told), *_unequal_norms(told)]
    copies = Counter(key for each in told for key in each.hashes)
    parameters = len({name for (name, _), count in copies.items() if count > 1})
    equal = f"{parameters} parameters equal on all their replicas" if parameters else "no parameter has replicas"
    line = f"first step: {equal}, gradient norms equal"
    if prediction is None:
        line += "; no prediction.json of this plan is beside it, so that bytes are held to nothing"
    else:
        apart = _apart(told, plan, prediction)
        faults += [fault for _, fault in apart if fault]
        if apart:
            line += f", weights and optimizer states within {max(share for share, _ in apart):.1%} of the ledger's"
    return faults, line


def _unequal_parameters(told: list[Witness]) -> Iterator[str]:
    """By component, the first parameter whose copies differ, and on which ranks."""
    by_key: dict[tuple[str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for each in told:
        for key, value in each.hashes.items():
            by_key[key][value].append(each.rank)
    seen = set()
    for (name, where), ranks in by_key.items():
        component = name.split(".")[1]
        if len(ranks) > 1 and component not in seen:
            seen.add(component)
            most, *others = sorted(ranks.values(), key=len, reverse=True)
            odd = sorted(rank for group in others for rank in group)
            place = f" ({where})" if where else ""
            yield f"{component}: parameter {name}{place} on {_ranks(odd)} is not that of {_ranks(most)}"


def _unequal_norms(told: list[Witness]) -> Iterator[str]:
    by_name: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for each in told:
        for name, norm in each.norms.items():
            by_name[name].append((norm, each.rank))
    for name, norms in by_name.items():
        (least, low), (most, high) = min(norms), max(norms)
        if most - least > NORM_TOLERANCE * most:
            yield f"{name}: the gradient's norm is {least:.6g} on rank {low} and {most:.6g} on rank {high}"


def _apart(told: list[Witness], plan: Plan, prediction: Prediction) -> list[tuple[float, str]]:
    """(difference as a share of what the ledger says, the fault where it is too large) of ranks and components."""
    found = []
    for each in told:
        for name, held in each.bytes.items():
            layout = plan.components[name]
            place = grid_of(layout).place(each.rank)
            if place is None or layout.offload != "none":
                continue  # offloaded states are in the host's ledger
            held_too = (name, *guests_of(name, plan.model["edges"]))
            memory = [prediction.components[one][place.stage].memory_gib for one in held_too]
            said = sum(one.weights + one.optimizer for one in memory) * _GIB
            wrong = held - said > BYTES_TOLERANCE * said + SLACK
            fault = (
                f"{name}: rank {each.rank} holds {held / _GIB:.3g} GiB of weights and optimizer states; the "
                f"ledger says {said / _GIB:.3g}"
            )
            found.append((abs(held - said) / max(said, 1.0), fault if wrong else ""))
    return found


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (", ..." if len(ranks) > 4 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _hashes(copies: Iterable[Copy]) -> dict[tuple[str, str], int]:
    return {(copy.name, copy.where): hash_of(copy.tensor) for copy in copies}


def hash_of(tensor: Tensor) -> int:
    """A number that depends on every bit of `tensor` and on its place; made where the tensor is."""
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8 if tensor.element_size() == 1 else torch.int16)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(torch.split(bits, _CHUNK)):
        places = torch.arange(1, 2 * len(chunk), 2, device=tensor.device)
        total = total * 1_000_003 + (chunk * places).sum() + number
    return int(total)


def _bytes(engine: Proved) -> dict[str, int]:
    """What this rank holds of weights and optimizer states, by component; padding does not count."""
    total: dict[str, int] = defaultdict(int)
    places = set()
    for piece in engine.held():
        component = piece.name.split(".")[1]
        places.add(piece.weight.data_ptr())
        for kind in piece.kinds:
            tensor = piece.tensor(kind)
            total[component] += tensor.numel() * tensor.element_size()
    for copy in engine.copies():
        if copy.tensor.data_ptr() not in places:
            total[copy.name.split(".")[1]] += copy.tensor.numel() * copy.tensor.element_size()
    return dict(total)
