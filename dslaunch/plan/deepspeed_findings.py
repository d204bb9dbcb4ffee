"""What DeepSpeed's modes ask of the user's script, and what they take on NVMe."""

from __future__ import annotations

from dslaunch.engines.base import Engine
from dslaunch.plan import nvme
from dslaunch.plan.evaluate import Evaluated
from dslaunch.planfile import Finding
from dslaunch.schema.config import RunConfig

MEMORY_NVME = "memory.nvme"


def nvme_gib(config: RunConfig, found: Evaluated) -> float:
    """NVMe space that the fullest node needs."""
    return nvme.gib_per_node(found.cases, config.cluster.slots)


def nvme_memory(config: RunConfig, found: Evaluated) -> list[Finding]:
    """Said wherever NVMe is used, since no other figure shows it; an error where it does not hold the files."""
    need, have = nvme_gib(config, found), config.cluster.node.nvme_gib
    if not need:
        return []
    over = need > have
    return [
        Finding(
            rule=MEMORY_NVME,
            severity="error" if over else "info",
            message=(
                f"{'does not fit: ' if over else ''}a node keeps {need:.0f} of {have:.0f} GiB of NVMe under "
                f"{config.strategy.nvme.path}"
            ),
            where="cluster.node.nvme_gib",
            fix="use more nodes, or offload=cpu" if over else "give each job a folder of its own, and that space",
        )
    ]


def by_script(config: RunConfig, engine: Engine, found: Evaluated) -> list[Finding]:
    """What only the user's script can do."""
    if engine.name != "deepspeed":
        return []
    name = config.model.trunk
    layout = found.cases[name].layout
    return [
        *(_autotp(name, layout.tp) if layout.tp > 1 else []),
        *(_ulysses(name, layout.cp) if layout.cp > 1 else []),
        *(_checkpointing() if config.engine.activation_checkpointing.enabled else []),
        *(_huggingface() if config.engine.huggingface else []),
    ]


def _autotp(name: str, tp: int) -> list[Finding]:
    return [
        Finding(
            rule="autotp.script",
            severity="info",
            message=(
                f"AutoTP cuts the model that the script hands to deepspeed.initialize over {tp} ranks, which must "
                "all get the same samples: DeepSpeed stops at the first batch where they differ. DeepSpeed "
                f"counts each sample {tp} times in train_batch_size and in its samples per second"
            ),
            where=f"strategy.{name}.tp",
            fix=(
                f"sample by rank // {tp} of world // {tp}; the model is one of Hugging Face's with a tp_plan, "
                "or engine.extra.tensor_parallel.partition_config says how it is cut"
            ),
        )
    ]


def _ulysses(name: str, cp: int) -> list[Finding]:
    return [
        Finding(
            rule="ulysses.script",
            severity="info",
            message=(
                f"Ulysses: {cp} ranks share each sequence, and DeepSpeed makes their groups and nothing else; "
                "which tokens a rank gets, and attention over all of them, are the script's"
            ),
            where=f"strategy.{name}.cp",
            fix=(
                "cut each sequence by the rank in its group, and wrap attention in "
                "deepspeed.sequence.layer.DistributedAttention, or use UlyssesSPAttentionHF (DeepSpeed 0.17.0)"
            ),
        )
    ]


def _checkpointing() -> list[Finding]:
    return [
        Finding(
            rule="activation-checkpointing.script",
            severity="info",
            message="the section activation_checkpointing is read by deepspeed.checkpointing.configure alone",
            where="engine.activation_checkpointing.enabled",
            fix=(
                "call deepspeed.checkpointing.configure(mpu, deepspeed_config=FILE) in the script, and run layers "
                "through deepspeed.checkpointing.checkpoint"
            ),
        )
    ]


def _huggingface() -> list[Finding]:
    return [
        Finding(
            rule="huggingface.arguments",
            severity="info",
            message=(
                "ds_config.json holds `auto` where Hugging Face's Trainer fills in its own arguments; the plan "
                "holds only if those are the ones of hf_args.json"
            ),
            where="engine.huggingface",
            fix=(
                "give the script hf_args.json ({run_dir}/hf_args.json after --), and its TrainingArguments "
                "deepspeed={ds_config}"
            ),
        )
    ]
