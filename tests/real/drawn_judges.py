"""What is asked of the real parts about a rendered folder, and what they must answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from dslaunch.engines.megatron_catalogue import (
    Catalogue,
    megatron_catalogue,
    megatron_deepspeed_catalogue,
    megatron_mimo_catalogue,
)
from dslaunch.planfile import Plan, plan_from_json
from tests.megatron_parser import parsed
from tests.real.drawn_plans import Drawn
from tests.real.megatron_lines import Line

KUBERNETES = json.loads((Path(__file__).parents[1] / "data" / "kubernetes_schemas.json").read_text())
STUB = """\
#!/bin/bash
# Stands for the interpreter, and keeps what it is started with.
[[ $2 == *gpus.py ]] && exit 0
[[ $1 == -c ]] && echo 29511 && exit 0 # a free port
printf '%s\\0' "$@" >"$DRAWN_RECORD.argv"
env -0 >"$DRAWN_RECORD.env"
"""
_NOT_ON_CPU = ("nvme", "zenflow", "super_offload", "zero_plus_plus", "wandb", "tensorboard")
"""Modes that an engine on this machine can't start: they need a GPU, a compiler or a package."""


@dataclass(frozen=True)
class Folder:
    """A command line that passed, and what was rendered for it."""

    drawn: Drawn
    path: Path
    files: dict[str, str]
    plan: Plan
    prediction: dict[str, Any]

    @classmethod
    def at(cls, path: Path, drawn: Drawn) -> Folder:
        files = {
            file.name: file.read_text(encoding="utf-8") for file in sorted(path.iterdir()) if file.is_file()
        }
        plan = plan_from_json(files["plan.json"], "plan.json")
        return cls(drawn, path, files, plan, json.loads(files["prediction.json"]))


@dataclass(frozen=True)
class Question:
    """One for `tests.real.drawn_worker`, and what its answer must hold."""

    folder: Folder
    kind: str
    given: dict[str, Any]
    wanted: dict[str, Any]


@dataclass
class Verdict:
    """What was judged, by the part that judged it, and each disagreement."""

    judged: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def hold(self, holds: bool, folder: Folder, message: str) -> None:
        if not holds:
            self.wrong.append(f"draw {folder.drawn.number}: {message}\n    {folder.drawn.text}")


def own(folder: Folder, verdict: Verdict) -> None:
    """The plan's own arithmetic: ranks, batch, layers, and memory against what it says of it."""
    plan = folder.plan
    verdict.judged["plan"] += 1
    for name, part in plan.components.items():
        verdict.hold(
            part.micro_batch * part.num_microbatches * part.dp == plan.global_batch, folder, f"{name}: batch"
        )
        verdict.hold(part.rank_offset + part.ranks <= plan.world_size, folder, f"{name}: ranks")
        verdict.hold(len(part.stages) == part.pp, folder, f"{name}: stages")
        held = sorted(rank for stage in part.stages for rank in stage.ranks)
        wanted = list(range(part.rank_offset, part.rank_offset + part.ranks))
        verdict.hold(held == wanted, folder, f"{name}: each rank holds one stage")
        layers = plan.model["components"][name].get("layers", 1)  # an MLP is one
        verdict.hold(sum(stage.layers for stage in part.stages) == layers, folder, f"{name}: layers")
    _memory(folder, verdict)


def _memory(folder: Folder, verdict: Verdict) -> None:
    told, plan = folder.prediction, folder.plan
    found = {each["rule"]: each for each in told["findings"]}
    low, high = (told["memory_band"] or {}).get("low", 1.0), (told["memory_band"] or {}).get("high", 1.0)
    peak, limit = told["peak_memory_gib"], told["memory_limit_gib"]
    accepted = any(each.startswith("memory.") for each in plan.accepted)
    verdict.hold(accepted or peak * low <= limit, folder, f"{peak} x {low} GiB do not fit in {limit}")
    verdict.hold(
        peak * high <= limit or "memory.gpu" in found, folder, f"{peak} x {high} GiB may not fit, unsaid"
    )
    stages = [stage["memory_gib"] for part in told["components"].values() for stage in part]
    sums = [sum(terms.values()) - 2 * terms["total"] for terms in stages]
    verdict.hold(all(abs(each) < 1e-3 for each in sums), folder, "a stage's terms add up to another total")
    terms = sum(told["worst"]["memory_gib"].values())
    verdict.hold(abs(terms - peak) < 0.01, folder, f"the worst rank's terms are {terms}, the peak is {peak}")
    alone = max(terms["total"] for terms in stages) + told["overhead_gib"]
    verdict.hold(alone <= peak + 0.01, folder, f"a stage takes {alone}, the peak is {peak}")


def scripts(folders: Sequence[Folder], verdict: Verdict, *, linted: int) -> None:
    """bash reads every script, and shellcheck those of the first folders."""
    for number, folder in enumerate(folders):
        paths = [str(folder.path / name) for name in folder.files if name.endswith((".sh", ".sbatch"))]
        for path in paths:
            done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
            verdict.hold(done.returncode == 0, folder, f"bash -n: {done.stderr}")
        verdict.judged["bash"] += len(paths)
        if number < linted:
            done = subprocess.run(
                ["shellcheck", "--shell=bash", *paths], capture_output=True, text=True, check=False
            )
            verdict.hold(done.returncode == 0, folder, f"shellcheck: {done.stdout}")
            verdict.judged["shellcheck"] += len(paths)


def kubernetes(folder: Folder, verdict: Verdict) -> None:
    """The published schemas of the operators."""
    if "kubernetes.yaml" not in folder.files:
        return
    verdict.judged["kubernetes"] += 1
    *_, job = yaml.safe_load_all(folder.files["kubernetes.yaml"])
    try:
        jsonschema.validate(job, KUBERNETES[job["kind"].lower()]["schema"])
    except jsonschema.ValidationError as error:
        verdict.hold(False, folder, f"kubernetes.yaml: {error.message}")


def catalogues(folder: Folder, verdict: Verdict) -> None:
    """The flags and values that the version of the plan takes."""
    if "megatron_args.txt" not in folder.files:
        return
    verdict.judged["Megatron's flags"] += 1
    try:
        parsed(folder.files["megatron_args.txt"], catalogue_of(folder.plan))
    except (Exception, SystemExit) as error:
        verdict.hold(False, folder, f"megatron_args.txt: {error}")


def catalogue_of(plan: Plan) -> Catalogue:
    """Of the framework and version that the plan is for."""
    if plan.engine.name == "megatron_deepspeed":
        return megatron_deepspeed_catalogue()
    if plan.engine.name == "megatron_mimo":
        return megatron_mimo_catalogue(plan.engine.version)
    return megatron_catalogue(plan.engine.version)


def started(
    folder: Folder, name: str, words: Sequence[str], **env: str
) -> tuple[list[str], dict[str, str], str]:
    """The words and the environment that a rendered script starts the interpreter with, and its complaint."""
    stub = folder.path.parent / "python3"
    if not stub.exists() or stub.read_text() != STUB:
        stub.write_text(STUB)
        stub.chmod(0o755)
    record = folder.path.parent / f"{folder.path.name}.{env.get('DSLAUNCH_RUNNER', 'rank')}"
    given = {
        **os.environ, "DSLAUNCH_PYTHON": str(stub), "DRAWN_RECORD": str(record), "WANDB_API_KEY": "x",
        "DSLAUNCH_MEGATRON_PATH": str(folder.path), **env,
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(folder.path / name), *words], env=given, cwd=folder.path.parent, capture_output=True,
        text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode == 2 and not startable(folder.plan):
        return [], {}, ""
    if done.returncode or not Path(f"{record}.argv").exists():
        return [], {}, f"{name} ends with {done.returncode}: {done.stderr[-500:]}"
    argv = Path(f"{record}.argv").read_text(encoding="utf-8").split("\0")[:-1]
    pairs = Path(f"{record}.env").read_text(encoding="utf-8").split("\0")[:-1]
    return argv, dict(pair.split("=", 1) for pair in pairs), ""


def startable(plan: Plan) -> bool:
    """Whether there is a program: without one the files are rendered for review, and say what is missing."""
    if plan.engine.name in ("megatron", "megatron_deepspeed"):
        return bool(plan.engine.path and plan.files.data_path and plan.files.tokenizer)
    return bool(plan.program.script or plan.program.module)


def rank(folder: Folder, verdict: Verdict) -> tuple[list[str], dict[str, str]]:
    """What rank.sh runs on rank 0, and with which environment."""
    plan = folder.plan
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(plan.world_size)}
    argv, environ, complaint = started(folder, "rank.sh", (), **env)
    verdict.judged["rank.sh"] += 1
    verdict.hold(not complaint, folder, complaint)
    return argv, environ


def questions(folder: Folder, verdict: Verdict, *, engine: bool) -> Iterator[Question]:
    """All that can be asked of one folder.

    Args:
        engine: DeepSpeed's engine is to start, where this machine can.
    """
    yield from _deepspeed(folder, engine)
    yield from _launch(folder, verdict)
    if "hostfile" in folder.files:
        wanted = {"slots": sum(folder.plan.cluster.by_host)}
        yield Question(folder, "hostfile", {"path": str(folder.path / "hostfile")}, wanted)
    if "accelerate.yaml" in folder.files:
        wanted = {"processes": folder.plan.world_size, "machines": folder.plan.cluster.nodes}
        wanted |= {"mesh": _mesh(folder, verdict)}
        yield Question(folder, "accelerate", {"path": str(folder.path / "accelerate.yaml")}, wanted)


def _mesh(folder: Folder, verdict: Verdict) -> int:
    """The ranks of the mesh that torch.json names, 0 where replicas alone are there."""
    settings = json.loads(folder.files["torch.json"])
    mesh = settings.get("mesh")
    ranks = mesh["dp_replicate"] * mesh["dp_shard"] if mesh else folder.plan.world_size
    verdict.hold(ranks == folder.plan.world_size, folder, f"torch.json: a mesh of {ranks} ranks")
    return ranks if settings["sharding"] == "hsdp" else 0


def _deepspeed(folder: Folder, engine: bool) -> Iterator[Question]:
    plan = folder.plan
    for name, part in plan.components.items():
        text = folder.files.get(f"ds_config.{name}.json") or folder.files.get("ds_config.json")
        if not text or not part.trainable:
            continue
        config = json.loads(text)
        own_groups = plan.engine.name == "deepspeed" and (part.tp > 1 or part.cp > 1)
        # Under AutoTP DeepSpeed counts every rank, so each sample tp times.
        total = plan.global_batch * (part.tp if plan.engine.name == "deepspeed" else 1)
        wanted = {"batch": [total, part.micro_batch, part.num_microbatches], "stage": part.zero}
        given = {"config": config, "world": plan.world_size, "dp": part.dp, "own_groups": own_groups}
        if "hf_args.json" in folder.files:
            given["arguments"] = json.loads(folder.files["hf_args.json"])
        modes = {*plan.engine.modes, *config}
        possible = "optimizer" in config and not (modes & set(_NOT_ON_CPU)) and not own_groups
        starts = engine and possible and plan.world_size <= 1024 and "nvme" not in part.offload
        yield Question(folder, "DeepSpeed", {**given, "initialize": int(starts)}, wanted)


def _launch(folder: Folder, verdict: Verdict) -> Iterator[Question]:
    """The lines of launch.sh, as the launchers' own parsers read them."""
    cluster = folder.plan.cluster
    hosts = folder.path.parent / f"{folder.path.name}.hosts"
    hosts.write_text("".join(f"n{host} slots={size}\n" for host, size in enumerate(cluster.by_host)))
    env = {"DSLAUNCH_NODE_RANK": "0", "DSLAUNCH_MASTER_ADDR": "n0", "DSLAUNCH_HOSTFILE": str(hosts)}
    wanted = {"nodes": cluster.nodes, "gpus": cluster.gpus_per_node}
    for runner in ("torchrun", "deepspeed"):
        argv, _, complaint = started(folder, "launch.sh", (), DSLAUNCH_RUNNER=runner, **env)
        verdict.hold(not complaint, folder, complaint)
        if argv:
            words = [word.replace(str(folder.path), "/run") for word in argv]
            yield Question(folder, runner, {"argv": words}, wanted)


def ask(asked: Sequence[Question], verdict: Verdict) -> None:
    """All questions, of one process that imports the frameworks once."""
    texts = [json.dumps({"kind": each.kind, **each.given}) for each in asked]
    once = dict.fromkeys(texts)  # components of one configuration, launch lines of one size
    jobs = [json.loads(text) for text in once]
    done = subprocess.run(
        [sys.executable, "-m", "tests.real.drawn_worker"], input=json.dumps(jobs), capture_output=True, text=True,
        check=False, env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers = dict(zip(once, json.loads(done.stdout), strict=True))
    for each, answer in zip(asked, map(answers.__getitem__, texts), strict=True):
        verdict.judged[each.kind] += 1
        verdict.judged["DeepSpeed's engine"] += bool(answer.get("optimizer"))
        held = {key: answer.get(key) for key in each.wanted}
        verdict.hold(
            held == each.wanted and "error" not in answer,
            each.folder,
            f"{each.kind}: {answer}, for {each.wanted}",
        )
        if each.given.get("initialize") and "error" not in answer:
            verdict.hold(bool(answer.get("optimizer")), each.folder, f"{each.kind}: no engine: {answer}")


def megatron_line(folder: Folder, argv: Sequence[str], environ: dict[str, str]) -> Line:
    """The command line of Megatron's script as rank.sh gives it."""
    around = ("cores.py", "profiled.py")
    named = (
        index for index, word in enumerate(argv) if word.endswith(".py") and Path(word).name not in around
    )
    at = next(named) + 1
    kept = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "PYTORCH_CUDA_ALLOC_CONF", "NVTE_CPU_OFFLOAD_V1")
    if any(name in folder.plan.cluster.gpu for name in ("B200", "B300")):
        environ = {kept[0]: "1", **environ}  # Blackwell needs none; who judges stands for an H100
    pairs = tuple((name, environ[name]) for name in kept if name in environ)
    return Line(folder.plan.world_size, tuple(argv[at:]), pairs)
