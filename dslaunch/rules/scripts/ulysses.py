"""Ulysses in a training script: what it hands to DeepSpeed's sequence parallelism, against ranks and model."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.deepspeed.config import one_config
from dslaunch.rules.deepspeed.model import model_in
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_SOURCE = "deepspeedai/DeepSpeed:deepspeed/runtime/sequence_parallel/ulysses_sp.py 0.19.8, run"
_RANKS = "deepspeedai/DeepSpeed:deepspeed/runtime/sequence_parallel/parallel_state_sp.py 0.19.8, run"
_CLASS = "UlyssesSPAttentionHF"
_ARGUMENTS = (
    "model_name_or_path", "core_attn_implementation", "sequence_parallel_size", "micro_batch_size", "seq_length",
    "seq_length_is_variable", "disable_in_eval", "max_length",
)  # fmt: skip
_MICRO = "train_micro_batch_size_per_gpu"


@dataclass(frozen=True)
class _Registered:
    """One call of UlyssesSPAttentionHF.register_with_transformers that cuts sequences."""

    script: Script
    call: Call

    def given(self, name: str) -> ast.expr | None:
        """The expression of an argument; None where it isn't given."""
        return self.call.argument(name, _ARGUMENTS.index(name))

    def number(self, name: str) -> int | None:
        """An argument that is written out as a whole number."""
        value = self.script.constant(self.given(name))
        return value if type(value) is int else None

    def text(self, name: str) -> str | None:
        """An argument that is written out as text."""
        value = self.script.constant(self.given(name))
        return value if isinstance(value, str) else None

    @property
    def size(self) -> int | None:
        """Ranks that share a sequence."""
        return self.number("sequence_parallel_size")

    @property
    def length(self) -> int | None:
        """Tokens of each sequence, where it is fixed."""
        given = self.number("seq_length")
        return self.number("max_length") if given is None else given


def _registered(files: FileSet) -> Iterator[_Registered]:
    """The calls that do more than return, as they do for a size of 1."""
    for script in scripts(files):
        for call in script.methods("register_with_transformers"):
            found = _Registered(script, call)
            if call.owner.rpartition(".")[2] == _CLASS and found.size != 1:
                yield found


@rule("ulysses.ranks", severity="error", raised_by="deepspeed.initialize", evidence=_RANKS, since="0.18.0")
def ranks(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A sequence-parallel size in a script that doesn't divide the ranks."""
    for found in _registered(files):
        size, world = found.size, settings.world_size
        if size is not None and size < 1:
            message = f"sequence_parallel_size {size}: ValueError, it must be 1 or more."
            yield found.script.hit(found.call, message, "Write the number of ranks that share a sequence.")
        elif size is not None and world is not None and world % size:
            message = f"sequence_parallel_size {size} doesn't divide {world} ranks: RuntimeError."
            yield found.script.hit(found.call, message, f"Use a size that divides {world}.")


@rule("ulysses.heads", severity="error", raised_by="deepspeed.initialize", evidence=_SOURCE, since="0.18.0")
def heads(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Attention heads, or key-value heads, that can't be shared out over the ranks of a sequence."""
    model = model_in(files)
    if model is None or not model.shapes:
        return
    text = next((shape for shape in model.shapes[1:] if "num_attention_heads" in shape), model.shapes[0])
    queries = text.get("num_attention_heads")
    keys = text.get("num_key_value_heads") or queries
    if type(queries) is not int or type(keys) is not int:
        return
    yield from _uneven(keys, model.source, plan, files, settings)
    for found in _registered(files):
        size = found.size
        if size is None or size < 1:
            continue
        if queries % size:
            message = f"{model.source} has {queries} attention heads, no multiple of {size}: ValueError."
            yield found.script.hit(found.call, message, f"Use a size that divides {queries}.")
        elif keys % size and size % keys:
            message = f"{keys} key-value heads over {size} ranks, and neither divides the other: ValueError."
            yield found.script.hit(found.call, message, f"Use a divisor or a multiple of {keys}.")


def _uneven(
    keys: int, source: str, plan: Plan | None, files: FileSet, settings: Settings
) -> Iterator[Hit]:  # fmt: skip
    """DistributedAttention of deepspeed.sequence shares heads unevenly, but leaves no rank without one."""
    config = one_config(plan, files, settings)
    size = config.number("sequence_parallel_size") if config is not None else None
    for script in scripts(files) if size is not None and keys % size and keys < size else ():
        for call in script.called("deepspeed.sequence.layer.DistributedAttention"):
            message = f"{source} has {keys} key-value heads for {size:g} ranks: AssertionError in the first pass."
            yield script.hit(call, message, f"Use a sequence_parallel_size of at most {keys}.")


@rule("ulysses.attention", severity="error", raised_by="deepspeed.initialize", evidence=_SOURCE, since="0.18.0")
def attention(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """An attention that Ulysses can't take over, or another than the model was loaded with."""
    for found in _registered(files):
        chosen = found.text("core_attn_implementation")
        if chosen in ("eager", "paged|eager"):
            message = f"{chosen} attention needs a mask over the whole sequence: ValueError."
            yield found.script.hit(found.call, message, "Use sdpa, flex_attention, or a flash attention.")
        loaded = _loaded_with(found)
        if chosen and loaded and loaded != chosen:
            message = f"core_attn_implementation {chosen}, and the model was loaded with {loaded}: ValueError."
            yield found.script.hit(found.call, message, "Give both the same name.")


def _loaded_with(found: _Registered) -> str | None:
    """The attn_implementation of the from_pretrained that made the model which is handed over."""
    model = found.script.bound(found.given("model_name_or_path"))
    if not isinstance(model, ast.Call) or not found.script.name(model.func).endswith(".from_pretrained"):
        return None
    given = next((each.value for each in model.keywords if each.arg == "attn_implementation"), None)
    value = found.script.constant(given)
    return value if isinstance(value, str) else None


@rule("ulysses.length", severity="error", raised_by="deepspeed.initialize", evidence=_SOURCE, since="0.18.0")
def length(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Sequences of a fixed length that isn't given, or that the ranks can't share evenly."""
    for found in _registered(files):
        fixed = found.script.constant(found.given("seq_length_is_variable")) is False
        given = found.given("seq_length") or found.given("max_length")
        if fixed and given is None and not found.call.unpacks:
            message = "seq_length_is_variable is False, and no seq_length is given: ValueError."
            yield found.script.hit(found.call, message, "Give seq_length, or leave the lengths variable.")
        if found.length is not None and found.size and found.size > 0 and found.length % found.size:
            message = (
                f"sequences of {found.length} tokens can't be shared by {found.size} ranks: ValueError with the "
                "first batch."
            )
            yield found.script.hit(found.call, message, f"Pad sequences to a multiple of {found.size}.")


@rule("ulysses.micro-batch", severity="error", raised_by="deepspeed", evidence=_SOURCE, since="0.18.0")
def micro_batch(plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Another micro-batch for Ulysses than that of the DeepSpeed JSON: the first pass raises."""
    config = one_config(plan, files, settings)
    held = config.number(_MICRO) if config is not None else None
    for found in _registered(files) if held is not None else ():
        given = found.number("micro_batch_size")
        if given is not None and given != held:
            message = f"micro_batch_size {given} here, and {_MICRO} {held:g}: AssertionError in the first pass."
            yield found.script.hit(found.call, message, "Give the same number in both.")


@rule("ulysses.positions", severity="info", raised_by="nobody", evidence=_SOURCE, since="0.18.0")
def positions(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Ulysses in a script that names no position_ids, which each batch must hold."""
    for found in _registered(files):
        if not found.script.called("torch.utils.data.DataLoader"):
            continue
        if "position_ids" not in found.script.python.text and "Flattening" not in found.script.python.text:
            message = "each batch needs position_ids (ValueError without them), and nothing here names them."
            fix = "Add position_ids to what the collator returns: torch.arange(length) for each sequence."
            yield found.script.hit(found.call, message, fix)
