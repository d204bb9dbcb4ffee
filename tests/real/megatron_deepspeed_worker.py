"""megatron_deepspeed_worker.py FOLDER: command lines in, what Megatron-DeepSpeed's parser and validation say out.

The same protocol as megatron_worker.py. FOLDER is a checkout of deepspeedai/Megatron-DeepSpeed, of which
megatron/arguments.py runs as it stands, with the installed DeepSpeed; a GPU is answered for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import sys
import types
import warnings
from typing import Any


@dataclasses.dataclass
class _Config:
    """In place of megatron.core's TransformerConfig, whose fields become arguments."""


def _module(name: str, **held: object) -> None:
    module = types.ModuleType(name)
    vars(module).update(held)
    sys.modules[name] = module


def _arguments(folder: str) -> Any:
    """megatron/arguments.py of the checkout, without the package around it, which wants apex and a GPU."""
    _module("megatron")
    _module("megatron.global_vars", set_retro_args=lambda _: None, get_retro_args=lambda: None)
    _module("tools")
    _module("tools.retro")
    _module("tools.retro.utils", get_args_path=lambda path: path)
    _module("megatron.core")
    _module("megatron.core.transformer", TransformerConfig=_Config)
    spec = importlib.util.spec_from_file_location("megatron.arguments", f"{folder}/megatron/arguments.py")
    assert spec is not None
    assert spec.loader is not None
    arguments = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(arguments)
    gpu = types.SimpleNamespace(device_name=lambda: "cuda")
    arguments.deepspeed.accelerator.get_accelerator = lambda: gpu
    return arguments


def main(folder: str) -> None:
    """Answer until the input ends."""
    warnings.filterwarnings("ignore")
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        arguments = _arguments(folder)
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        os.environ.update(job["environ"], WORLD_SIZE=str(job["world"]))
        sys.argv = ["pretrain_gpt.py", *job["argv"]]
        raised, said = None, io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                arguments.validate_args(arguments.parse_args())
        except (Exception, SystemExit) as error:
            raised = f"{type(error).__name__}: {error} {said.getvalue()[-100:]}"
        print(json.dumps({"raised": raised}), flush=True)


main(sys.argv[1])
