"""The messages of a step, sent and received by this rank, and their bytes counted."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dslaunch.runtime.messages import PIPELINE, Message, Step
from dslaunch.runtime.tasks import Task

Shape = Callable[[Message], tuple[int, int]]
"""(tokens, width) of one sample in a message."""


@dataclass(frozen=True)
class _Sent:
    """Rows under way."""

    taken_at: int
    """Position of the task that takes them."""
    work: Any
    rows: Tensor


class Exchange:
    """Sends without waiting, and receives from each rank in the order in which that rank sends.

    Both orders follow from the list of tasks, so that no message needs a label (NCCL has none), and a rank
    that waits waits for a task that stands before its own. What is sent is held until a message shows that its
    receiver is past the task that takes it: about as much as a pipeline has in flight, not all of a step.
    """

    def __init__(
        self, step: Step, rank: int, dtype: torch.dtype, device: torch.device, shape_of: Shape
    ) -> None:
        self.rank, self.dtype, self.device, self.shape_of = rank, dtype, device, shape_of
        self.outgoing: dict[Task, list[Message]] = defaultdict(list)
        self.incoming: dict[Task, list[Message]] = defaultdict(list)
        self.in_order: dict[int, list[Message]] = defaultdict(list)
        for message in step.messages:
            if message.source == rank:
                self.outgoing[message.sender].append(message)
            if message.destination == rank:
                self.incoming[message.receiver].append(message)
                if message.source != rank:
                    self.in_order[message.source].append(message)
        for messages in self.incoming.values():
            messages.sort(key=lambda message: (message.edge, message.samples))
        self.sent_bytes: Counter[str] = Counter()
        """By kind (pipeline, redistribution), since the start; what stays on a rank does not count."""
        self._expected: dict[int, deque[Message]] = {}
        self._arrived: dict[Message, Tensor] = {}
        self._position = {task: number for number, task in enumerate(step.tasks)}
        self._sending: dict[int, deque[_Sent]] = defaultdict(deque)
        """By receiver, in the order of sending."""

    def begin(self) -> None:
        """A new step."""
        self._expected = {source: deque(messages) for source, messages in self.in_order.items()}

    def end(self) -> None:
        """Wait until everything is sent."""
        for sent in self._sending.values():
            _release(sent, len(self._position))
        assert not self._arrived, "messages that no task took"

    def send(self, message: Message, rows: Tensor) -> None:
        """`rows` without their graph: two engines' graphs must not be chained on the ranks that hold both."""
        rows = rows.detach().to(self.dtype).contiguous()
        if message.destination == self.rank:
            self._arrived[message] = rows
            return
        kind = "pipeline" if message.edge == PIPELINE else "redistribution"
        self.sent_bytes[kind] += rows.numel() * rows.element_size()
        work = dist.isend(rows, message.destination)
        self._sending[message.destination].append(_Sent(self._position[message.receiver], work, rows))

    def take(self, message: Message) -> Tensor:
        """What `message` brings: [samples, tokens, width]."""
        while message not in self._arrived:
            first = self._expected[message.source].popleft()
            rows = torch.empty(
                (len(first.samples), *self.shape_of(first)), dtype=self.dtype, device=self.device
            )
            dist.recv(rows, first.source)
            self._arrived[first] = rows
            _release(self._sending[first.source], self._position[first.sender])
        return self._arrived.pop(message)


def _release(sent: deque[_Sent], before: int) -> None:
    """Let go of all up to the last that a task before position `before` takes: the receiver had those first."""
    arrived = max((number for number, each in enumerate(sent, 1) if each.taken_at < before), default=0)
    for _ in range(arrived):
        sent.popleft().work.wait()
