"""Values in accelerate's sections for Megatron-LM, fp8 and torch's compiler, which each process reads as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

from dslaunch.errors import listed
from dslaunch.files.fileset import File, FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.accelerate.launch import FALSE, TRUE, overridden
from dslaunch.rules.deepspeed.values import shown
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.settings import Settings

_PLUGINS = (
    "huggingface/accelerate:src/accelerate/utils/launch.py, utils/dataclasses.py MegatronLMPlugin, "
    "TERecipeKwargs, MSAMPRecipeKwargs, TorchDynamoPlugin 1.8.1, 1.12.0 and 1.15.0, run; "
    "NVIDIA/Megatron-LM:megatron/core/parallel_state.py 0.16.1"
)
_DEGREES = ("tp_degree", "pp_degree", "context_parallel_size")
_WHOLE, _NUMBER, _TRUTH = "a whole number", "a number", "true or false"
_MEGATRON: Mapping[str, str] = {
    **dict.fromkeys((*_DEGREES, "num_micro_batches", "recompute_num_layers", "decoder_last_pipeline_num_layers",
                     "expert_model_parallel_size", "expert_tensor_parallel_size"), _WHOLE),
    **dict.fromkeys(("gradient_clipping", "attention_dropout", "hidden_dropout"), _NUMBER),
    **dict.fromkeys(("sequence_parallelism", "recompute_activations", "use_distributed_optimizer",
                     "use_custom_fsdp", "no_load_optim", "no_save_optim", "eod_mask_loss", "optimizer_cpu_offload",
                     "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer", "attention_backend",
                     "attention_softmax_in_fp32", "calculate_per_token_loss", "use_rotary_position_embeddings"),
                    _TRUTH),
}  # fmt: skip
"""Keys without megatron_lm_; attention_backend is a switch to accelerate, not the name that Megatron takes."""
_TE = {**dict.fromkeys(("margin", "interval", "amax_history_len"), _WHOLE), "use_autocast_during_eval": _TRUTH}
_AO = dict.fromkeys(("pad_inner_dim", "enable_fsdp_float8_all_gather"), _TRUTH)
_COMPILER = dict.fromkeys(("use_dynamic", "use_fullgraph", "use_regional_compilation"), _TRUTH)
_NOT_NULL = frozenset({"tp_degree", "pp_degree", "gradient_clipping", "use_custom_fsdp", *_COMPILER})
"""What reaches the processes as the text None where it is null."""
_BACKENDS = ("TE", "MSAMP", "AO", "NO")


def _is_truth(text: str) -> bool:
    return text.lower() in TRUE + FALSE


def _reads(kind: Callable[[str], object]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            kind(text)
        except ValueError:
            return False
        return True

    return check


_CHECKS: Mapping[str, Callable[[str], bool]] = {_WHOLE: _reads(int), _NUMBER: _reads(float), _TRUTH: _is_truth}


@rule("accelerate.setting", severity="error", raised_by="accelerate", evidence=_PLUGINS)
def setting(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A value in a section of accelerate's configuration that the processes can't read, or Megatron can't grid."""
    commanded = overridden(files)
    for file in files.of("accelerate"):
        given = commanded.get(file.name, frozenset())
        if str(file.get("distributed_type")).upper() == "MEGATRON_LM":
            values = _section(file, "megatron_lm_config", "megatron_lm_", given)
            yield from _unreadable(file, "megatron_lm_config", values, _MEGATRON)
            yield from _grid(file, values)
        if str(file.get("mixed_precision")).lower() == "fp8":
            yield from _fp8(file, _section(file, "fp8_config", "fp8_", given))
        if str(file.get("distributed_type")).upper() != "DEEPSPEED":
            values = _section(file, "dynamo_config", "dynamo_", given)
            yield from _unreadable(file, "dynamo_config", values, _COMPILER)


def _section(file: File, section: str, prefix: str, given: frozenset[str]) -> dict[str, tuple[str, Any]]:
    """The values that count, by the name without its prefix: the key as it is written, and what it says."""
    values = file.get(section)
    return {
        str(key).removeprefix(prefix): (str(key), value)
        for key, value in (values.items() if isinstance(values, dict) else ())
        if f"{prefix}{str(key).removeprefix(prefix)}" not in given and not _is_gap(value)
    }


def _is_gap(value: Any) -> bool:
    """A place to be filled in: `{{ degree }}`, `$TP`, `<tp>`."""
    return isinstance(value, str) and any(mark in value for mark in "${<")


def _unreadable(
    file: File, section: str, values: Mapping[str, tuple[str, Any]], kinds: Mapping[str, str]
) -> Iterator[Hit]:
    for name, (key, value) in values.items():
        kind = kinds.get(name)
        if kind is None or (value is None and name not in _NOT_NULL):
            continue
        if not _CHECKS[kind](str(value)):
            message = f"{key} is {shown(value)}, and {kind} is read: each process raises ValueError."
            yield hit(file, (section, key), message, f"Write {kind}.")


def _grid(file: File, values: Mapping[str, tuple[str, Any]]) -> Iterator[Hit]:
    """Ranks that Megatron's degrees don't divide."""
    degrees = {name: values[name][1] for name in _DEGREES if name in values}
    ranks = file.get("num_processes")
    whole = [each for each in (*degrees.values(), ranks) if isinstance(each, int) and each > 0]
    if degrees and len(whole) == len(degrees) + 1 and ranks % prod(degrees.values()):
        product = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        message = f"{product} doesn't divide num_processes {ranks}: Megatron raises."
        yield hit(file, ("megatron_lm_config",), message, "Choose degrees whose product divides the processes.")


def _fp8(file: File, values: Mapping[str, tuple[str, Any]]) -> Iterator[Hit]:
    key, backend = values.get("backend", ("", None))
    if backend is not None and backend not in _BACKENDS:
        message = f"{key} is {shown(backend)}; accelerate 1.8 and newer raise ValueError, where capitals count."
        yield hit(file, ("fp8_config", key), message, f"Use {listed(_BACKENDS[:3])}.")
    kinds = {"TE": _TE, "AO": _AO}.get(str(backend), {})
    yield from _unreadable(file, "fp8_config", values, kinds)
    words: dict[str, tuple[str, ...]] = {}
    if backend == "TE":
        words = {"format": ("HYBRID", "E4M3", "E5M2"), "amax_compute_algo": ("max", "most_recent")}
    elif backend == "MSAMP":
        words = {"opt_level": ("O1", "O2")}
    for name, allowed in words.items():
        key, value = values.get(name, ("", None))
        known = str(value) in allowed or (backend == "TE" and str(value).lower() in map(str.lower, allowed))
        if value is not None and not known:
            message = f"{key} is {shown(value)}: each process raises ValueError."
            yield hit(file, ("fp8_config", key), message, f"Use {listed(allowed)}.")
    key, value = values.get("override_linear_precision", ("", None))
    three = isinstance(value, list) and len(value) >= 3 and all(_is_truth(str(each)) for each in value[:3])
    if value is not None and (backend == "TE" or not isinstance(value, str | list)) and not three:
        message = f"{key} is {shown(value)}, and no list of three: accelerate takes it apart, and raises."
        yield hit(file, ("fp8_config", key), message, "Write [false, false, false], with what is to be true.")
