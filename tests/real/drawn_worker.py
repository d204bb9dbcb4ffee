"""Answers questions about rendered folders with the frameworks' own readers, in one process.

python -m tests.real.drawn_worker < JOBS: a JSON list of jobs, each with its "kind". Prints a JSON list: what each
reader made of it, or its error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.real.rendered_deepspeed import apart


def configuration(job: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeedConfig at the plan's number of ranks; the Trainer's values are filled in first."""
    config = job["config"]
    if "arguments" in job:
        config = filled(config, job["arguments"], job["world"])
    if job["initialize"] and "optimizer" in config:
        config["optimizer"]["params"]["torch_adam"] = True  # the other would have to be compiled
    return apart({**job, "config": config})


def filled(config: dict[str, Any], arguments: dict[str, Any], world: int) -> dict[str, Any]:
    """As transformers' Trainer fills in `auto`."""
    from transformers import HfArgumentParser, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    class OfAll(TrainingArguments):
        world_size = property(lambda _: world)

    here = {name: value for name, value in arguments.items() if name != "deepspeed"}
    (given,) = HfArgumentParser(OfAll).parse_dict({**here, "use_cpu": True})
    made = HfTrainerDeepSpeedConfig(config)
    made.trainer_config_process(given)
    made.trainer_config_finalize(given, None, given.max_steps)
    whole: dict[str, Any] = made.config
    return whole


def torchrun(job: dict[str, Any]) -> dict[str, Any]:
    """torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    words = job["argv"]
    args = get_args_parser().parse_args(words[words.index("torch.distributed.run") + 1 :])
    return {"nodes": int(args.nnodes), "gpus": int(args.nproc_per_node)}


def deepspeed(job: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed launcher's own parser."""
    from deepspeed.launcher.runner import parse_args

    words = job["argv"]
    args = parse_args(words[words.index("deepspeed.launcher.runner") + 1 :])
    nodes = args.num_nodes if args.num_nodes > 0 else 1  # not told: this one
    return {"nodes": nodes, "gpus": args.num_gpus}


def hostfile(job: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed launcher's own reader."""
    from deepspeed.launcher.runner import fetch_hostfile

    return {"slots": sum(fetch_hostfile(job["path"]).values())}


def accelerate(job: dict[str, Any]) -> dict[str, Any]:
    """accelerate's loader, its launcher, and the mesh that its environment makes."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import launch

    config = load_config_from_file(job["path"])
    args = launch_command_parser().parse_args(["--config_file", job["path"], "train.py"])
    args, _, _ = _validate_launch_command(args)
    told = {name: str(value) for name, value in launch.prepare_multi_gpu_env(args).items()}
    mesh = 0
    if told.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        os.environ.update({name: value for name, value in told.items() if name.startswith("PARALLELISM")})
        mesh = ParallelismConfig().total_size
    return {"processes": config.num_processes, "machines": config.num_machines, "mesh": mesh}


READERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "DeepSpeed": configuration, "torchrun": torchrun, "deepspeed": deepspeed, "hostfile": hostfile,
    "accelerate": accelerate,
}  # fmt: skip


def main() -> None:
    jobs = json.load(sys.stdin)
    output = os.dup(1)
    os.dup2(2, 1)  # DeepSpeed prints to standard output
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda _: True  # as GPUs do

    answers = []
    for job in jobs:
        try:
            answers.append(READERS[job["kind"]](job))
        except (Exception, SystemExit) as error:
            answers.append({"error": f"{type(error).__name__}: {error}"})
    os.write(output, json.dumps(answers).encode())


if __name__ == "__main__":
    main()
