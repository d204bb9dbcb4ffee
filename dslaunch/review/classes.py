"""What kind of change a key of the plan or a rendered file makes: the table that `dslaunch diff` judges by."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

Kind = Literal["convergence", "reliability", "resources", "performance", "cosmetic"]
KINDS: tuple[Kind, ...] = ("convergence", "reliability", "resources", "performance", "cosmetic")
"""The gravest first: another result, another way to fail, another bill, another speed, another name."""

_KEYS: dict[str, Kind] = {
    "name": "cosmetic",
    "recipe": "cosmetic",
    "strategy": "cosmetic",
    "schema": "cosmetic",
    "world_size": "resources",
    "global_batch": "convergence",
    "cluster": "resources",
    "training": "convergence",
    "training.macro_batches": "performance",
    "training.schedule": "performance",
    "training.overlap_comm": "performance",
    "training.sequence_parallel": "performance",
    "engine.name": "performance",
    "engine.version": "reliability",
    "engine.sharding": "performance",
    "engine.path": "reliability",
    "engine.shard_size": "performance",
    "engine.extra": "convergence",
    "engine.modes": "convergence",
    "engine.modes.accelerate": "reliability",
    "engine.modes.activation_checkpointing": "performance",
    "engine.modes.autotp": "performance",
    "engine.modes.comet": "cosmetic",
    "engine.modes.csv_monitor": "cosmetic",
    "engine.modes.ddp": "performance",
    "engine.modes.ddp.comm_hook": "convergence",
    "engine.modes.ddp.sync_batchnorm": "convergence",
    "engine.modes.huggingface": "reliability",
    "engine.modes.nvme": "performance",
    "engine.modes.super_offload": "performance",
    "engine.modes.tensorboard": "cosmetic",
    "engine.modes.ulysses": "performance",
    "engine.modes.universal_checkpoint": "reliability",
    "engine.modes.wandb": "cosmetic",
    "engines": "cosmetic",
    "program": "convergence",
    "launcher": "reliability",
    "launcher.hostfile": "resources",
    "launcher.confirm_above": "cosmetic",
    "launcher.bind_cpus": "performance",
    "files.data_path": "convergence",
    "files.data_workers": "performance",
    "files.tokenizer": "convergence",
    "files.weights": "convergence",
    "files.checkpoint_dir": "reliability",
    "files.checkpoint_async": "reliability",
    "files.checkpoint_every": "reliability",
    "files.checkpoint_keep": "reliability",
    "files.checkpoint_load": "convergence",
    "supervision": "reliability",
    "components.*.params": "convergence",
    "components.*.trainable": "convergence",
    "components.*.lr": "convergence",
    "components.*.weight_decay": "convergence",
    "components.*.tp": "performance",
    "components.*.pp": "performance",
    "components.*.vpp": "performance",
    "components.*.cp": "performance",
    "components.*.ep": "performance",
    "components.*.etp": "performance",
    "components.*.dp": "performance",
    "components.*.zero": "performance",
    "components.*.offload": "performance",
    "components.*.recompute": "performance",
    "components.*.micro_batch": "performance",
    "components.*.num_microbatches": "performance",
    "components.*.rank_offset": "performance",
    "components.*.layers_per_stage": "performance",
    "components.*.stages": "performance",
    "env_names": "reliability",
    "fabric": "reliability",
    "profile": "cosmetic",
    "model": "convergence",
    "model.name": "cosmetic",
    "model.source": "cosmetic",
    "accepted": "reliability",
}
"""By key of plan.json, `*` for a component's name; a key that is not here is judged as the one it stands in.

What nobody modelled (engine.extra, a new mode, the user's program) counts as convergence until somebody looks.
"""
_FILES: dict[str, Kind] = {
    "env.sh": "reliability",
    "ds_env": "reliability",
    "rank.sh": "reliability",
    "launch.sh": "reliability",
    "gpus.py": "reliability",
    "cores.py": "performance",
    "preflight.json": "reliability",
    "profiled.py": "cosmetic",
    "job.sbatch": "resources",
    "hostfile": "resources",
}
"""Scripts, which hold settings that plan.json does not, and what stands beside the training; the others follow
from the plan."""
_SAYS_NOTHING = re.compile(r"\s*#(?!SBATCH|!).*|#SBATCH --(job-name|output|error|comment)=.*|\s*")
"""Lines that a program does not act on."""


def kind_of_key(key: str) -> Kind:
    """The class of a change at the dotted `key`."""
    parts = key.split(".")
    if parts[0] == "components" and len(parts) > 1:
        parts[1] = "*"
    while parts:
        if kind := _KEYS.get(".".join(parts)):
            return kind
        parts.pop()
    raise AssertionError(f"{key} has no class")


def kind_of_file(name: str, before: str, after: str, planned: Iterable[Kind]) -> Kind:
    """The class of a change of a rendered file.

    Args:
        planned: the classes of the plan's changes. A framework's file follows from the plan; where the plan is the
            same, something else changed what the framework reads, and that is for a person to judge.
    """
    if name in _FILES:
        return _FILES[name] if _acted_on(before) != _acted_on(after) else "cosmetic"
    changed = [kind for kind in planned if kind != "cosmetic"]
    return gravest(changed) if changed else "convergence"


def gravest(kinds: Iterable[Kind]) -> Kind:
    """The first of KINDS that is among `kinds`, of which there is one."""
    return min(kinds, key=KINDS.index)


def _acted_on(text: str) -> list[str]:
    return [line for line in text.splitlines() if not _SAYS_NOTHING.fullmatch(line)]
