"""Reading the samples of the next step while this one is computed."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from dslaunch.runtime.data import Batch, Samples


class ReadAhead:
    """A data set of which one thread reads what this rank will ask for next.

    A rank asks for the same places of every step, so that what it reads in one tells what it reads in the next.
    What was read stays until the step ends: a pipeline's stage asks for labels twice.
    """

    def __init__(self, data: Samples, per_step: int) -> None:
        """
        Args:
            per_step: samples of a step, over all ranks.
        """
        self._data, self._per_step = data, per_step
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reading")
        self._read: dict[tuple[int, ...], Future[Batch]] = {}
        self._step = -1

    def at(self, numbers: Iterable[int]) -> Batch:
        """As the data set gives them; what goes wrong in the thread is raised where the samples are asked for."""
        wanted = tuple(numbers)
        step = wanted[0] // self._per_step
        if step != self._step:
            self._step = step
            self._read = {key: read for key, read in self._read.items() if key[0] // self._per_step == step}
        batch = self._begin(wanted).result()
        self._begin(tuple(number + self._per_step for number in wanted))
        return batch

    def _begin(self, numbers: tuple[int, ...]) -> Future[Batch]:
        if numbers not in self._read:
            self._read[numbers] = self._thread.submit(self._data.at, numbers)
        return self._read[numbers]
