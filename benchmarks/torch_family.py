"""What programs on PyTorch and Hugging Face do unless told otherwise: by a record's framework, date and notes.

An extra key of a record, where its source says more than the form has room for: `lora` (rank and targets).
"""

from __future__ import annotations

import re
from typing import Any

from benchmarks.records import Record
from dslaunch.hardware.software import Fp8

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DATE = re.compile(r"\b(" + "|".join(_MONTHS) + r")\w* (20\d\d)\b")
_USUAL = re.compile(r"dataset mean (\d+) tokens")
_ALPACA = 512
_NEWEST = (9999, 12)
_LOSS_COMPILED = (2025, 4)
"""torchtitan compiles the loss with the model (bbb1b616e; "turned off for now" in 9dec370, 2024-12)."""
_ENDS_APART = (2025, 8)
"""torchtitan shards embedding and head as units of their own (83e694105)."""
_ATTENTION_SAVED = (2025, 12)
"""torchtitan's selective checkpointing keeps the output of cuDNN's attention too (b39377f9f)."""
_LOSS_CHUNKED = (2026, 5)
"""torchtitan's Llama configurations have a chunked loss, which is not compiled (786e26f8e)."""
_BLACKWELL = ("B200", "B300", "GB200", "GB300")

_FSDP_QLORA = {"rank": 64, "targets": ("q", "k", "v", "gate", "up", "down")}
"""AnswerDotAI/fsdp_qlora train.py: lora_target_modules is all, lora_rank 64."""
_LITGPT_ALL = {"rank": 8, "targets": ("q", "k", "v", "o", "gate", "up", "down", "output")}
_LITGPT = {"rank": 32, "targets": ("q", "v")}
"""Lightning-AI/litgpt config_hub/finetune/*/lora.yaml."""
_MEGATRON_SWIFT = {"rank": 8, "targets": ("qkv", "o", "gate", "up", "down", "experts")}
"""modelscope/ms-swift examples/megatron/lora/*.sh: target_modules all-linear, lora_rank 8."""
_QWEN = {"rank": 64, "targets": ("qkv", "o", "gate", "up", "down")}
"""QwenLM/Qwen finetune.py (LoraArguments), for models before Qwen1.5."""


def date(record: Record) -> tuple[int, int]:
    """(year, month) of the software that ran; far in the future where the record does not say: the newest."""
    found = _DATE.search((record.framework_version or "").lower())
    return (int(found[2]), _MONTHS.index(found[1]) + 1) if found else _NEWEST


def is_torchtitan(record: Record) -> bool:
    return record.framework == "torchtitan"


def completed(record: Record) -> Record:
    """The run with what its program's own scripts settle.

    torchtune's max_seq_len cuts nothing where samples of alpaca are not packed: few have more than 512
    tokens. QwenLM/Qwen trains all parameters with finetune/finetune_ds.sh: ds_config_zero3.json, on one
    GPU too.
    """
    if record.framework == "torchtune" and _says(record, "unpacked") and record.seq_len:
        return record.model_copy(update={"seq_len": min(record.seq_len, _ALPACA)})
    if _is_first_qwen(record) and record.category == "sft" and record.zero_stage == 0:
        return record.model_copy(update={"framework": f"{record.framework} + DeepSpeed", "zero_stage": 3})
    return record


def has_own_grid(record: Record) -> bool:
    """Whether a program on plain PyTorch shards optimizer states alone, or cuts a model into stages, without
    FSDP: by code of its own, which keeps 16-bit weights, accumulates in fp32, and runs 1F1B, as Megatron does
    (huggingface/nanotron: src/nanotron/optim/zero.py, parallel/pipeline_parallel/engine.py, 2411b02)."""
    name = record.framework.lower()
    if is_torchtitan(record) or any(word in name for word in ("hf", "swift")):
        return False
    return record.zero_stage == 1 or (record.zero_stage == 0 and (record.pp or 1) > 1)


def without_deepspeed(record: Record) -> bool:
    """Whether a program that may run under DeepSpeed ran without it."""
    return "swift" in record.framework.lower() and not record.zero_stage


def _is_first_qwen(record: Record) -> bool:
    """Whether QwenLM/Qwen's finetune.py ran."""
    return record.framework.startswith("HF Trainer") and record.model.name.startswith("Qwen-")


def software(record: Record) -> dict[str, Any]:
    """Fields of `dslaunch.hardware.software.Software` that the framework decides."""
    name = record.framework.lower()
    compiled = _says(record, "compile") and not _says(record, "eager")
    found: dict[str, Any] = {"compiled": compiled}
    if is_torchtitan(record):
        found |= _torchtitan(record, compiled)
    elif name == "torchtune":
        found |= _torchtune(record, compiled)
    elif name == "litgpt":
        found |= _litgpt()
    elif "arctic" in name or "ulysses" in name:
        found |= _arctic(record)
    elif "llm-foundry" in name:
        found |= {"loss": "fused", "joined_ends": True, "expandable_segments": False}
    elif any(word in name for word in ("hf", "swift", "qlora")):
        found |= _hugging_face(record)
    return found


def _hugging_face(record: Record) -> dict[str, Any]:
    """Trainer: weights as they are loaded, in 16 bits, and their moments alike, as those of copies of embedding
    and head; adapters in fp32. ms-swift pads to the longest sample; fsdp_qlora has FSDP1, all in bf16, and the
    model's output at hand (train.py). Qwen's first models make no fp32 copy of the logits: the loss has 16 bits
    under DeepSpeed, which finetune_qlora_single_gpu.sh has too, and no autocast."""
    name = record.framework.lower()
    lora_rig = name == "fsdp_qlora"
    usual = _USUAL.search(record.notes or "")
    return {
        "half_states": record.category == "sft" or lora_rig or ends_train(record),
        "foreach_step": True,
        "expandable_segments": False,
        "joined_ends": lora_rig,
        "logits_held": lora_rig,
        "varying_lengths": "swift" in name and not _says(record, "packing=true"),
        "half_loss": _is_first_qwen(record) and (record.category == "qlora" or "deepspeed" in name),
        "usual_tokens": int(usual[1]) if usual else 0,
        "logits_upcast": not _own_attention(record) and not record.model.name.startswith("Qwen-"),
        "naive_split": "naive layer split" in name,
        "flash_attention": record.flash_attention is not False and not _own_attention(record),
    }


def _own_attention(record: Record) -> bool:
    """ChatGLM's and Baichuan's code adds a mask or biases to the scores, which flash attention can't."""
    return record.model.name.lower().startswith(("chatglm", "baichuan"))


def _torchtitan(record: Record, compiled: bool) -> dict[str, Any]:
    """FSDP2 in fp32 states; selective checkpointing is by operation unless it says every how many layers."""
    when = date(record)
    unchunked = "fused" if compiled and when >= _LOSS_COMPILED else "plain"
    modules = ["matmul"]
    if record.gpu.type in _BLACKWELL and when < _ATTENTION_SAVED:
        modules.append("attention")
    return {
        "loss": "chunked" if when >= _LOSS_CHUNKED else unchunked,
        "joined_ends": when < _ENDS_APART,
        "recompute_modules": tuple(modules),
        "repeated_kv": True,
        "fp8": "rowwise" if "rowwise" in record.id else fp8(record.precision or ""),
    }


def _litgpt() -> dict[str, Any]:
    """bf16-true: states and loss in 16 bits, gradients reduced once a step (Lightning-AI/litgpt
    config_hub/finetune, litgpt/finetune/lora.py and full.py, no_backward_sync)."""
    return {
        "half_states": True,
        "half_gradients": True,
        "whole_gradients": True,
        "foreach_step": True,
        "upcast_norms": True,
        "repeated_kv": True,
        "half_loss": True,
        "expandable_segments": False,
    }


def _arctic(record: Record) -> dict[str, Any]:
    """ArcticTraining: Liger's loss by pieces of the tokens, tiled MLP and checkpoints on the host where
    they are on."""
    return {
        "loss": "chunked" if _says(record, "liger=true") else "plain",
        "tiled_mlp": _says(record, "tiled_mlp_compute=true"),
        "offloaded_activations": "activations->cpu" in (record.offload or ""),
        "logits_upcast": True,
    }


def _torchtune(record: Record, compiled: bool) -> dict[str, Any]:
    """Single-device recipes keep all states in bf16 (torchtune/recipes/full_finetune_single_device.py, 0.4).

    Options that a table adds one after the other stand in the notes as the last one of them.
    """
    chunked = not any(_says(record, f"cumulative: {word}") for word in ("unpacked", "packed"))
    later = [
        _says(record, word) for word in ("optimizer in backward", "activation offloading", "8-bit adamw")
    ]
    adapters = record.category in ("lora", "qlora")
    paged = _says(record, "8-bit/in-backward") and not adapters
    return {
        "half_states": True,
        "upcast_norms": True,
        "repeated_kv": True,
        "logits_upcast": True,
        "compiled": compiled or chunked,
        "loss": "chunked" if chunked else "fused" if compiled else "plain",
        "logits_whole": True,
        "step_in_backward": any(later) or paged,
        "offloaded_activations": any(later[1:]) or adapters,
        "optimizer": "paged_adamw8bit" if paged else "adamw8bit" if later[2] else "adamw",
    }


def fp8(precision: str) -> Fp8:
    """The data type of matrix products' inputs."""
    if precision in ("mxfp8", "nvfp4"):
        return "mxfp8" if precision == "mxfp8" else "nvfp4"
    return "tensorwise" if precision == "fp8" else "none"


def _says(record: Record, words: str) -> bool:
    return words in f"; {record.notes or ''} {record.recompute_detail or ''}".lower()


def memory_kind(record: Record) -> str | None:
    """ms-swift prints torch.cuda.max_memory_reserved (swift/trainers/trainers.py, 4312aeb28; mixin.py,
    2.6); other Trainers print nothing, so that users read nvidia-smi."""
    if record.framework.startswith("ms-swift"):
        return "reserved"
    printed = record.measured.memory_class == "as_printed"
    return "nvidia_smi" if printed and record.framework.startswith("HF") else None


def adapters(record: Record) -> dict[str, Any]:
    """Rank and targets of a record's adapters, by framework."""
    found = {"rank": 8, "targets": ("q", "k", "v")}
    if record.framework == "fsdp_qlora":
        found = _FSDP_QLORA
    if record.framework == "litgpt":
        every = record.model.name.lower().startswith(("gemma", "phi", "tiny"))
        found = _LITGPT_ALL if every else _LITGPT
    if _is_first_qwen(record):
        found = _QWEN
    if record.framework == "Megatron-SWIFT":
        found = _MEGATRON_SWIFT
    return found | dict((record.model_extra or {}).get("lora") or {})


def recompute(record: Record) -> str:
    """Of torchtitan, whose configurations checkpoint selectively where nobody says otherwise."""
    words = record.recompute or "selective"
    return "full" if words.startswith("full") or every_second_layer(record) else words


def every_second_layer(record: Record) -> bool:
    """Whether selective checkpointing covers every second layer whole."""
    return "every-2nd-layer" in (record.recompute_detail or "")


def rounds(record: Record) -> int:
    """Micro-batches of a step where the record does not say: litgpt's configurations accumulate 2 to 16."""
    return 4 if record.framework == "litgpt" else 1


def micro_batch(record: Record) -> int:
    """torchtitan cuts a rank's batch into as many micro-batches as there are pipeline stages, unless told
    otherwise (torchtitan/parallelisms/pipelining_utils.py, 9dec370)."""
    given = record.micro_batch
    stages = record.pp or 1
    assert given is not None  # known.completed gives one
    if not is_torchtitan(record) or given % stages:
        return given
    return given // stages


def ends_train(record: Record) -> bool:
    """Whether embedding and head train beside the adapters: `LoRA (emb)` of Qwen's tables."""
    return "lora-emb" in record.id
