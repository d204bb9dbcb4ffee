"""Names of modules and of layers' classes, against the model that a script loads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from dslaunch.errors import listed
from dslaunch.files.fileset import File, FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.registry import Hit, hit, rule
from dslaunch.rules.scripts.defaults import value_of
from dslaunch.rules.scripts.objects import class_of
from dslaunch.rules.scripts.tree import Script, scripts
from dslaunch.rules.settings import Settings

_GATED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_FUSED = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")


@dataclass(frozen=True)
class Family:
    """Models of one type in transformers."""

    type: str
    ids: re.Pattern[str]
    """Their names on the hub, in lower case."""
    layer: str
    """The class of a layer."""
    linear: tuple[str, ...]
    """The last parts of the names of its layers' linear modules."""


def _family(kind: str, ids: str, layer: str, linear: tuple[str, ...]) -> Family:
    return Family(kind, re.compile(ids), layer, linear)


FAMILIES = (
    _family("llama", r"meta-llama/(meta-)?llama-(2|3|3\.1|3\.3)-.*|meta-llama/llama-3\.2-[13]b.*|tinyllama/.*"
            r"|huggyllama/.*|lmsys/vicuna-.*", "LlamaDecoderLayer", _GATED),
    _family("qwen2", r"qwen/qwen2(\.5)?-(math-|coder-)?[\d.]+b(-instruct)?", "Qwen2DecoderLayer", _GATED),
    _family("qwen3", r"qwen/qwen3-[\d.]+b(-base)?", "Qwen3DecoderLayer", _GATED),
    _family("mistral", r"mistralai/mistral-7b-.*", "MistralDecoderLayer", _GATED),
    _family("gemma", r"google/gemma-[27]b(-it)?", "GemmaDecoderLayer", _GATED),
    _family("gemma2", r"google/gemma-2-\d+b(-it)?", "Gemma2DecoderLayer", _GATED),
    _family("gpt_neox", r"eleutherai/(pythia-.*|gpt-neox-20b)", "GPTNeoXLayer", _FUSED),
    _family("bloom", r"bigscience/bloomz?(-\d.*)?", "BloomBlock", _FUSED),
    _family("falcon", r"tiiuae/falcon-(7|40|180)b(-instruct)?", "FalconDecoderLayer", _FUSED),
    _family("gpt2", r"(openai-community/)?gpt2(-medium|-large|-xl)?", "GPT2Block", ("c_attn", "c_proj", "c_fc")),
    _family("opt", r"facebook/opt-.*", "OPTDecoderLayer",
            ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")),
    _family("phi", r"microsoft/phi-(1|1_5|2)", "PhiDecoderLayer",
            ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2")),
    _family("phi3", r"microsoft/phi-3-(mini|medium)-.*", "Phi3DecoderLayer",
            ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
)  # fmt: skip
"""transformers 5.24.0; tests/real/test_rules_against_trainers.py builds one of each."""
_MODULES = frozenset(name for family in FAMILIES for name in family.linear)
_LAYERS = frozenset(family.layer.lower() for family in FAMILIES)


_OF_ONE = re.compile(r"(?:For[A-Z]\w+|LMHeadModel|Model)\.from_pretrained$")
_PARTS = re.compile(r"DecoderLayer$|Layer$|Block$")


def _loaded(files: FileSet, script: Script) -> tuple[str, Family] | None:
    """The one model that a script loads, by name or class, and its family; None where several or none are told."""
    found: set[tuple[str, str]] = set()
    for call in script.methods("from_pretrained"):
        loader = call.owner.rpartition(".")[2]
        if loader.startswith("AutoModel"):
            name = value_of(files, script, call.argument("pretrained_model_name_or_path", 0), call.around)
            text = name if isinstance(name, str) else ""
            found.add((text, next((each.type for each in FAMILIES if each.ids.fullmatch(text.lower())), "")))
        elif _OF_ONE.search(call.name) and call.name.startswith("transformers."):
            prefix = _OF_ONE.sub("", f"{loader}.from_pretrained")
            found.add((loader, next((each.type for each in FAMILIES if _PARTS.sub("", each.layer) == prefix), "")))
        elif _OF_ONE.search(call.name) or "Model" in loader:
            return None
    name, kind = found.pop() if len(found) == 1 else ("", "")
    return next(((name, family) for family in FAMILIES if family.type == kind), None)


@rule(
    "script.lora-targets", severity="error", raised_by="transformers",
    evidence="peft 0.21.2, run; huggingface/transformers:src/transformers/models 5.24.0",
)  # fmt: skip
def targets(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """LoRA's target_modules are those of another family of models than the one that is loaded."""
    for script in scripts(files):
        made = script.called("peft.LoraConfig", "peft.AdaLoraConfig")
        if len(made) != 1 or made[0].unpacks:
            continue
        given, loaded = script.bound(made[0].keyword("target_modules")), _loaded(files, script)
        parts = given.elts if isinstance(given, ast.List | ast.Tuple | ast.Set) else []
        names = [each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        ends = {each.rpartition(".")[2] for each in names}
        if not names or len(names) != len(parts):
            continue
        if loaded is None:
            own = _own_model(script, list(scripts(files)))
            if own and not ends & own[1]:
                message = f"{own[0]}'s classes here hold no module {listed(names)}: ValueError of peft."
                yield script.hit(made[0], message, f"Name linear layers of {own[0]}.")
            continue
        name, family = loaded
        if ends <= _MODULES and not ends & set(family.linear):
            message = f"{name} is of the family {family.type}, which has no {listed(names)}: ValueError of peft."
            yield script.hit(made[0], message, f"Use some of {listed(family.linear)}, or all-linear.")


_FOREIGN = re.compile(
    r"from_pretrained|timm|torchvision|hub\.load|add_module|ModuleDict|setattr|Auto\w+|import \*|from_config"
)
"""What puts modules into a model whose names no file here tells."""
_OF_TORCH = frozenset({"linear1", "linear2", "out_proj", "self_attn", "multihead_attn", "layers"})
"""Names within torch's own layers of transformers."""


def _own_model(script: Script, every: list[Script]) -> tuple[str, set[str]] | None:
    """The class of the one model that peft gets, where the files tell all of it, and their modules' names."""
    given = {each.argument("model", 0) for each in script.called("peft.get_peft_model")}
    model = given.pop() if len(given) == 1 else None
    made = class_of(script, model, every) if model is not None else None
    if made is None or any(_FOREIGN.search(each.python.text) for each in every):
        return None
    names = {
        node.attr for each in every for node in each.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }  # fmt: skip
    texts = " ".join(each.python.text for each in every)
    return made.name, names | (_OF_TORCH if re.search(r"Transformer|MultiheadAttention", texts) else set())


@rule(
    "accelerate.fsdp-layer", severity="error", raised_by="accelerate",
    evidence="huggingface/accelerate:src/accelerate/utils/dataclasses.py set_auto_wrap_policy 1.15.0, run",
)  # fmt: skip
def layer(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A class to wrap by FSDP that the model, which the script beside loads, doesn't have."""
    told = [file for file in files.of("accelerate", "hf_arguments") if isinstance(file.get("fsdp_config"), dict)]
    found = [each for script in scripts(files) if (each := _loaded(files, script)) is not None] if told else []
    for file in told if len(found) == 1 else ():
        (name, family), key = found[0], _KEYS[file.kind]
        given = file.get("fsdp_config", key) or file.get("fsdp_config", _KEYS["accelerate"])
        named = [each.strip() for each in given.split(",")] if isinstance(given, str) else given
        layers = [each for each in named if _is_layer(each)] if isinstance(named, list) else []
        wrong = [each for each in layers if each != family.layer]
        if wrong and _wraps(file):
            message = f"{name} is of the family {family.type}, which has no {wrong[0]}: ValueError in prepare."
            yield hit(file, ("fsdp_config", key), message, f"Write {family.layer}, or leave it out.")


_KEYS = {"accelerate": "fsdp_transformer_layer_cls_to_wrap", "hf_arguments": "transformer_layer_cls_to_wrap"}


def _wraps(file: File) -> bool:
    """Whether FSDP wraps by the class of a layer."""
    if file.kind == "hf_arguments":
        return "auto_wrap" in str(file.get("fsdp"))
    return str(file.get("fsdp_config", "fsdp_auto_wrap_policy")) in ("TRANSFORMER_BASED_WRAP", "None")


def _is_layer(name: object) -> bool:
    """Whether it is the class of some family's layers, or meant to be one: no model here has two of these."""
    return isinstance(name, str) and (name.lower().endswith("decoderlayer") or name.lower() in _LAYERS)
