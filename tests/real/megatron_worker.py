"""megatron_worker.py FOLDER: command lines in, what Megatron-LM's own parser and validation say of them out.

A line of JSON {"world", "argv", "environ"} is answered by one {"raised": text or null}. FOLDER is a checkout of
Megatron-LM. What a machine without GPU lacks is answered as on an H100 with a recent Transformer Engine:
compute capability, versions, fused kernels, triton. Nothing else of Megatron is replaced.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import copy
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import sys
import types
import typing
import warnings
from typing import Any
from unittest.mock import MagicMock

_ABSENT = ("triton", "wandb", "one_logger_utils", "nvidia_resiliency_ext")
_OF_TRAINING = (
    "get_args", "get_timers", "get_adlr_autoresume", "get_tensorboard_writer", "get_wandb_writer",
    "get_one_logger", "get_signal_handler", "get_energy_monitor", "get_tokenizer", "print_rank_0",
)  # fmt: skip
_KERNELS = (
    "fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs", "fused_unpermute",
)  # fmt: skip
_ENVIRON = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "PYTORCH_CUDA_ALLOC_CONF", "NVTE_CPU_OFFLOAD_V1")


class _Absent(types.ModuleType):
    """A module that isn't there, and whose parts nobody calls while arguments are read."""

    __path__: list[str] = []
    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, _path: object, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] in _ABSENT else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is to be run."""


def _as_on_a_gpu(folder: str) -> Any:
    """Megatron's module of arguments, imported without a GPU."""
    typing.override = lambda function: function  # type: ignore[attr-defined]
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.utils.flop_counter
    import transformers  # noqa: F401  (before triton is answered for)

    torch.compile = lambda function=None, **_: function or (lambda inner: inner)  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    hopper: Any = types.SimpleNamespace(major=9, minor=0)
    torch.cuda.get_device_properties = lambda *_: hopper
    package = types.ModuleType("megatron.training")
    package.__path__ = [f"{folder}/megatron/training"]
    for name in _OF_TRAINING:
        setattr(package, name, lambda *_, **__: None)
    sys.modules["megatron.training"] = package
    sys.meta_path.append(_Finder())
    arguments = importlib.import_module("megatron.training.arguments")
    rope = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")
    experts = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    rotary = ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd")
    for module, names in ((rope, rotary), (experts, _KERNELS)):
        for name in names:
            setattr(module, name, getattr(module, name, None) or (lambda *_, **__: None))
    for name in ("megatron.core.utils", "megatron.core.transformer.transformer_config", arguments.__name__):
        for version in ("is_te_min_version", "is_torch_min_version"):
            setattr(importlib.import_module(name), version, lambda *_, **__: True)
    return arguments


def _judge(arguments: Any, calculator: Any, argv: list[str]) -> None:
    """Raise what Megatron raises."""
    sys.argv = ["pretrain_gpt.py", *argv]
    args = copy.deepcopy(arguments.parse_args(None))
    args = arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    arguments.core_transformer_config_from_args(args)
    calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR = None
    calculator.init_num_microbatches_calculator(
        0, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size, args.data_parallel_size,
        args.decrease_batch_size_if_needed,
    )  # fmt: skip


def main(folder: str) -> None:
    """Answer until the input ends."""
    warnings.filterwarnings("ignore")
    sys.path.insert(0, folder)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
        arguments = _as_on_a_gpu(folder)
        calculator = importlib.import_module("megatron.core.num_microbatches_calculator")
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    # To build the parser of 900 arguments takes longer than all the rest of a line.
    arguments.add_megatron_arguments = lambda _: parser
    arguments._print_args = lambda *_: None
    # The interpreter's own exit closes standard input, and with it the way to the next line.
    builtins.exit = sys.exit  # type: ignore[assignment]
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        for name in _ENVIRON:
            os.environ.pop(name, None)
        os.environ.update(job["environ"], WORLD_SIZE=str(job["world"]))
        raised = None
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                _judge(arguments, calculator, job["argv"])
        except (Exception, SystemExit) as error:
            raised = f"{type(error).__name__}: {error}"
        print(json.dumps({"raised": raised}), flush=True)


main(sys.argv[1])
