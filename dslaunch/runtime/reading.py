"""Reading the samples of the next step while this one is computed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.connection import wait

from dslaunch.planfile import Plan
from dslaunch.runtime.data import Batch, Fitting, Samples, open_data

LEAVING_S = 5.0


class ReadAhead:
    """A data set of which a thread, or processes, read what this rank will ask for next.

    A rank asks for the same places of every step, so that what it reads in one tells what it reads in the next.
    What was read stays until the step ends: a pipeline's stage asks for labels twice.
    """

    def __init__(
        self, readers: Executor, read: Callable[[tuple[int, ...]], Batch | bytes], per_step: int
    ) -> None:
        """
        Args:
            read: what a reader does; another process hands a micro-batch over pickled.
            per_step: samples of a step, over all ranks.
        """
        self._readers, self._do, self._per_step = readers, read, per_step
        self._read: dict[tuple[int, ...], Future[Batch | bytes]] = {}
        self._step = -1
        self.waited_s = 0.0
        """For samples that were not read yet when they were asked for, since the start."""

    def at(self, numbers: Iterable[int]) -> Batch:
        """As the data set gives them; what goes wrong with a reader is raised where the samples are asked for."""
        wanted = tuple(numbers)
        step = wanted[0] // self._per_step
        if step != self._step:
            self._step = step
            self._read = {key: read for key, read in self._read.items() if key[0] // self._per_step == step}
        began = time.perf_counter()
        read = self._begin(wanted).result()
        batch: Batch = pickle.loads(read) if isinstance(read, bytes) else read
        self.waited_s += time.perf_counter() - began
        self._begin(tuple(number + self._per_step for number in wanted))
        return batch

    def _begin(self, numbers: tuple[int, ...]) -> Future[Batch | bytes]:
        if numbers not in self._read:
            self._read[numbers] = self._readers.submit(self._do, numbers)
        return self._read[numbers]

    def close(self) -> None:
        """Read nothing more. What is being read is waited for, `LEAVING_S` at most: nobody will ask for it."""
        ending = threading.Thread(target=self._readers.shutdown, kwargs={"cancel_futures": True}, daemon=True)
        ending.start()
        ending.join(LEAVING_S)


def read_ahead(plan: Plan) -> ReadAhead:
    """The samples of `plan`, held to it and read ahead.

    Raises:
        ConfigError: an unknown data set, or a model that it does not suit.
    """
    data = Fitting(open_data(plan), plan)
    if not plan.files.data_workers:
        return by_thread(data, plan.global_batch)
    # Spawned, not forked: this process has threads, and a device of its own.
    processes = ProcessPoolExecutor(
        plan.files.data_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(plan,),
    )
    return ReadAhead(processes, _read_by_worker, plan.global_batch)


def by_thread(data: Samples, per_step: int) -> ReadAhead:
    """`data`, read by one thread."""
    return ReadAhead(ThreadPoolExecutor(max_workers=1, thread_name_prefix="reading"), data.at, per_step)


class _Worker:
    """What one reading process has."""

    plan: Plan
    samples: Samples | None = None


def _begin_worker(plan: Plan) -> None:
    """In a reading process: signals are for the rank, and where that has ended there is nothing to read for."""
    import torch

    _Worker.plan = plan
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_the_rank, daemon=True).start()


def _end_with_the_rank() -> None:
    rank = multiprocessing.parent_process()
    assert rank is not None
    wait([rank.sentinel])
    os._exit(0)


def _read_by_worker(numbers: tuple[int, ...]) -> bytes:
    # The data set is opened here, not when the process begins: what goes wrong reaches whoever asks for samples.
    if _Worker.samples is None:
        _Worker.samples = Fitting(open_data(_Worker.plan), _Worker.plan)
    # Not as shared memory, torch's way between processes: containers have 64 MB of it.
    return pickle.dumps(_Worker.samples.at(numbers))
