"""Every touch of DeepSpeed that its documentation does not cover. Verified on 0.19.8.

Call these before `deepspeed.init_distributed`.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def use_cpu_accelerator() -> None:
    """Let DeepSpeed take the CPU as its device; it reads the variable when it is first imported."""
    assert "deepspeed" not in sys.modules or os.environ.get("DS_ACCELERATOR") == "cpu"
    os.environ["DS_ACCELERATOR"] = "cpu"


def leave_out_shared_memory_op() -> None:
    """Let CPU ranks talk through gloo alone.

    DeepSpeed compiles an operator for collectives in shared memory when it joins the process group
    (deepspeed/comm/torch.py, TorchBackend): minutes on a busy host, a lock file that blocks later jobs when
    one is killed, and no use over several hosts. `deepspeed.comm.torch` as an attribute is torch itself, so
    the module is taken from sys.modules.
    """
    module: Any = sys.modules["deepspeed.comm.torch"]
    assert hasattr(module, "build_shm_op"), "this DeepSpeed builds its shared-memory operator elsewhere"
    module.build_shm_op = lambda: None
