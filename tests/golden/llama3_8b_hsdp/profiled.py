"""What a profiled rank runs: profiled.py KIND COUNTED FIRST STEPS OUT -- [-m] PROGRAM ARGUMENTS

It runs the program as Python would, and profiles optimizer steps FIRST to FIRST + STEPS - 1 of this process: KIND
torch writes OUT.json.gz (a Chrome trace), OUT.txt (operators by time) and OUT.share.json (the share of the time in
which nothing hid the communication), KIND nsys tells the Nsight Systems around this process when to capture. A
step ends where the program calls dslaunch.progress.step; where it does not, where the first engine of DeepSpeed
(COUNTED deepspeed) or the first optimizer of PyTorch (COUNTED torch) has stepped.

This file is written into the run folder. It needs Python 3.9 and the program's own torch, not dslaunch.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Steps:
    """Counts optimizer steps, and calls `begin` before the first chosen one, `end` after the last."""

    def __init__(self, first: int, count: int, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._first, self._last, self._begin, self._end = first, first + count - 1, begin, end
        self._done, self._told, self._owner = 0, False, 0
        self._running = False
        if first == 1:
            self._start()

    def told(self) -> None:
        """The program says that a step is done."""
        if self._told or self._done == 0:
            self._step()
        self._told = True

    def stepped(self, owner: int) -> None:
        """An optimizer, or an engine, has stepped; only the first that ever does is counted."""
        self._owner = self._owner or owner
        if owner == self._owner and not self._told:
            self._step()

    def finish(self) -> None:
        """The program ends: what was begun is written."""
        if self._running:
            self._running = False
            self._end()
        elif self._done < self._first - 1:
            said = f"profile: step {self._first} never began, {self._done} were done; nothing is written"
            print(said, file=sys.stderr)

    def _step(self) -> None:
        self._done += 1
        if self._done == self._first - 1:
            self._start()
        elif self._done == self._last and self._running:
            self._running = False
            self._end()

    def _start(self) -> None:
        self._running = True
        self._begin()


def torch_profiler(out: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """Begin and end of a recording by torch.profiler, which is written to `out`.json.gz and `out`.txt."""
    from torch import cuda, profiler

    kinds = [profiler.ProfilerActivity.CPU]
    if cuda.is_available():
        kinds.append(profiler.ProfilerActivity.CUDA)
    recording: Any = profiler.profile(activities=kinds, record_shapes=True)

    def begin() -> None:
        recording.start()

    def end() -> None:
        recording.stop()
        recording.export_chrome_trace(f"{out}.json.gz")
        order = "self_cuda_time_total" if len(kinds) > 1 else "self_cpu_time_total"
        table = recording.key_averages().table(sort_by=order, row_limit=40)
        Path(f"{out}.txt").write_text(f"{table}\n", encoding="utf-8")
        print(f"profile: {out}.json.gz and {out}.txt are written")
        write_share(out, communication_share(spans(recording.events())))

    return begin, end


def spans(events: Any) -> list[tuple[str, float, float, bool]]:
    """(name, start, end, whether it is a GPU's) of what was recorded, microseconds."""
    return [
        (each.name, each.time_range.start, each.time_range.end, each.device_type.name == "CUDA")
        for each in events
    ]


def communication_share(found: list[tuple[str, float, float, bool]]) -> float | None:
    """The share of the recorded time in which a rank only communicated; None where it never did.

    On a GPU, NCCL's kernels while no other kernel runs; on a CPU, Gloo's calls while no operator of PyTorch runs.
    """
    on_gpu = any(gpu for *_, gpu in found)
    mine = [each for each in found if each[3] == on_gpu and (on_gpu or each[0].startswith(("gloo:", "aten::")))]
    kind = "nccl" if on_gpu else "gloo:"
    talk = [(start, end) for name, start, end, _ in mine if name.lower().startswith(kind)]
    work = [(start, end) for name, start, end, _ in mine if not name.lower().startswith(kind)]
    if not talk:
        return None
    whole = max(end for _, end in (*talk, *work)) - min(start for start, _ in (*talk, *work))
    return (_length([*talk, *work]) - _length(work)) / whole if whole else None


def _length(intervals: list[tuple[float, float]]) -> float:
    """Of their union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def write_share(out: Path, share: float | None) -> None:
    """OUT.share.json, which the run's supervisor holds against its threshold."""
    if share is None:
        print("profile: no communication was recorded, so its share is not known")
        return
    rank = os.environ.get("RANK", "0")
    row = {"communication_share": share, "where": f"rank {rank}"}
    Path(f"{out}.share.json").write_text(json.dumps(row) + "\n", encoding="utf-8")
    print(f"profile: {share:.1%} of the recorded time of rank {rank} went to communication that nothing hid")


def cuda_range() -> tuple[Callable[[], None], Callable[[], None]]:
    """Begin and end of the range that `nsys profile --capture-range=cudaProfilerApi` records."""
    from torch import cuda

    runtime: Any = cuda.cudart()  # type: ignore[no-untyped-call]

    def begin() -> None:
        runtime.cudaProfilerStart()

    def end() -> None:
        cuda.synchronize()
        runtime.cudaProfilerStop()

    return begin, end


def follow(counted: str, steps: Steps) -> None:
    """Have every way in which a program steps tell `steps`.

    Args:
        counted: deepspeed: its engine, whose optimizers step by parts; torch: optimizers themselves.
    """
    if counted == "deepspeed":
        from deepspeed.runtime.engine import DeepSpeedEngine

        _after(DeepSpeedEngine, "_take_model_step", lambda engine, *_: steps.stepped(id(engine)))
    else:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda optimizer, *_: steps.stepped(id(optimizer)))
    try:
        from dslaunch import progress
    except ImportError:
        return  # a program without dslaunch in its environment cannot tell its steps either
    _after(progress, "step", lambda *_: steps.told())


def _after(owner: Any, name: str, call: Callable[..., None]) -> None:
    """Have `call` called after each call of owner.name, with the same arguments."""
    original = getattr(owner, name)

    def both(*args: Any, **named: Any) -> Any:
        answer = original(*args, **named)
        call(*args)
        return answer

    setattr(owner, name, both)


def run(words: list[str]) -> None:
    """A program as Python's command line names it, in this process."""
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        script = os.path.abspath(words[0])
        sys.argv, sys.path[0] = words, os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")


def main(argv: list[str]) -> None:
    kind, counted, first, count, place, _, *words = argv
    out = Path(place)
    out.parent.mkdir(parents=True, exist_ok=True)
    begin, end = torch_profiler(out) if kind == "torch" else cuda_range()
    steps = Steps(int(first), int(count), begin, end)
    atexit.register(steps.finish)
    follow(counted, steps)
    run(words)


if __name__ == "__main__":
    main(sys.argv[1:])
