"""The kernel itself kills a process for memory, and is heard."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslaunch.run.kernel import Kernel

_LIMIT = 30 * 2**20
_GREEDY = "x = bytearray(200 * 2**20)"


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory cgroup of 30 MiB; its processes are gone when it is removed."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent, key = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    group = parent / f"dslaunch-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        if not (group / key).exists():
            pytest.skip(f"{parent} hands no memory limit down")
        (group / key).write_text(str(_LIMIT))
        yield group
    finally:
        group.rmdir()


def _killed(group: Path) -> int:
    """The process that the kernel killed in `group`."""
    enter = f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(__import__('os').getpid())); "
    process = subprocess.Popen([sys.executable, "-c", enter + _GREEDY])
    assert process.wait(60) == -9
    return process.pid


def test_a_process_that_the_kernel_killed_for_memory_is_told_from_another_runs(small_group: Path) -> None:
    if not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("the kernel's log may not be read here")
    earlier = _killed(small_group)
    kernel = Kernel()
    pid = _killed(small_group)
    found = kernel.said({pid, earlier})
    assert len(found) == 1, "what was killed before does not count"
    assert f"Killed process {pid} (" in found[0].line
    assert found[0].where == "this host's kernel log"
    other = Kernel()
    _killed(small_group)
    assert other.said({pid}) == (), "nor does what is none of ours"
