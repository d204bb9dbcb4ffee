"""Tokenizers in a training script: a padding token, a chat template and rows of the embedding that they lack."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.huggingface.collators import trainings
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.scripts.defaults import value_of
from dslaunch.rules.scripts.tree import Call, Script, scripts
from dslaunch.rules.settings import Settings

_CODE = "huggingface/transformers:src/transformers"


@rule(
    "huggingface.pad-token", severity="error", raised_by="transformers",
    evidence=f"{_CODE}/tokenization_utils_base.py _get_padding_truncation_strategies 5.24.0, run",
)  # fmt: skip
def pad_token(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A tokenizer without a padding token, which is asked to pad, or a classifier that isn't told of one."""
    yield from _of_classifiers(files)
    for script in scripts(files):
        if _SETS.search(script.python.text):
            continue
        for name, held, made in _tokenizers(files, script):
            if not _WITHOUT.fullmatch(name) and not _BEFORE_5.fullmatch(name):
                continue
            for call in script.calls:
                if _pads(script, call, held, made):
                    message = f"the tokenizer of {name} has no padding token, and is to pad here: ValueError."
                    fix = f"Write {min(held)}.pad_token = {min(held)}.eos_token before."
                    if _BEFORE_5.fullmatch(name):
                        message = f"{message[:-1]} in transformers 4; 5 gives it one."
                    found = script.hit(call, message, fix)
                    yield replace(found, severity="info") if _BEFORE_5.fullmatch(name) else found
                    break


def _of_classifiers(files: FileSet) -> Iterator[Hit]:
    """A decoder that classifies looks for the last token before the padding, by its own configuration."""
    for run in trainings(files):
        script, trainer = run.script, run.trainer
        names = (trainer.keyword("processing_class"), trainer.keyword("tokenizer"))
        told = "pad_token_id" in script.python.text or any(each is not None for each in names)
        single = run.said("per_device_train_batch_size") == 1
        made = script.bound(trainer.argument("model", 0))
        if told or single or not isinstance(made, ast.Call) or not _CLASSIFIES.fullmatch(script.name(made.func)):
            continue
        call = Call(made, script.name(made.func), trainer.around)
        name = value_of(files, script, call.argument("pretrained_model_name_or_path", 0), call.around)
        if isinstance(name, str) and _WITHOUT.fullmatch(name) and "Llama-2" not in name and not call.unpacks:
            message = (
                f"the configuration of {name} has no pad_token_id, by which the model finds the last token: "
                "ValueError, Cannot handle batch sizes > 1, in the first step."
            )
            yield script.hit(call, message, "Set model.config.pad_token_id = tokenizer.pad_token_id.")


_CLASSIFIES = re.compile(r"transformers\.\w+ForSequenceClassification\.from_pretrained")


_OF_FAMILY = tuple(f"transformers.GPT2Tokenizer{end}.from_pretrained" for end in ("", "Fast"))
_SETS = re.compile(r"pad_token|\.add_special_tokens\(|setup_chat_format|clone_chat_template")
_WITHOUT = re.compile(
    r"(?:openai-community/)?gpt2(?:-medium|-large|-xl)?|(?:distilbert/)?distilgpt2|EleutherAI/gpt-(?:neo|j)-\w+"
    r"|meta-llama/Llama-2-\w+-(?:chat-)?hf|meta-llama/Meta-Llama-3-\w+(?:-Instruct)?"
)
"""Models whose tokenizer has none."""
_BEFORE_5 = re.compile(r"EleutherAI/(?:pythia-[\w.-]+|gpt-neox-20b)")
"""Models whose tokenizer has none in transformers 4, and one of its class in 5."""
_PADDING = tuple(f"transformers.{name}" for name in (
    "DataCollatorWithPadding", "DataCollatorForLanguageModeling", "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
))  # fmt: skip


def _pads(script: Script, call: Call, tokenizers: set[str], made: Call) -> bool:
    if call.name in _PADDING:
        given = call.argument("tokenizer", 0)
        return isinstance(given, ast.Name) and _is(script, tokenizers, made, call, given.id)
    padding = script.constant(call.keyword("padding"))
    return _is(script, tokenizers, made, call, call.name) and padding in (True, "longest", "max_length")


@rule(
    "huggingface.chat-template", severity="error", raised_by="transformers",
    evidence=f"{_CODE}/tokenization_utils_base.py get_chat_template 5.24.0, run",
)  # fmt: skip
def chat_template(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """A chat template asked of the tokenizer of a model that was never taught to chat."""
    every = list(scripts(files))
    if any(_TEMPLATES.search(script.python.text) for script in every):
        return
    for script in every:
        for name, held, made in _tokenizers(files, script):
            for call in script.methods("apply_chat_template") if _NO_CHAT.fullmatch(name) else ():
                if _is(script, held, made, call, call.owner) and call.keyword("chat_template") is None:
                    message = (
                        f"{name} is a base model, and its tokenizer has no chat template: ValueError, "
                        "Cannot use chat template functions."
                    )
                    fix = f"Load the tokenizer of the model's Instruct version, or set {call.owner}.chat_template."
                    yield script.hit(call, message, fix)
                    break


_TEMPLATES = re.compile(r"chat_template\s*=|setup_chat_format|clone_chat_template|get_chat_template")
"""What sets one."""
_NO_CHAT = re.compile(
    r"(?:openai-community/)?gpt2(?:-medium|-large|-xl)?|(?:distilbert/)?distilgpt2|EleutherAI/[\w.-]+"
    r"|meta-llama/(?:Llama-2-\d+b-hf|Meta-Llama-3-\d+B|(?:Meta-)?Llama-3\.[12]-\d+B)|mistralai/Mistral-7B-v0\.[13]"
    r"|tiiuae/falcon-(?:7b|40b|rw-1b)|google/gemma(?:-2)?-\d+b|facebook/opt-[\w.]+|bigscience/bloom[\w.-]*"
)
"""Base models whose tokenizer has no template."""


def _tokenizers(files: FileSet, script: Script) -> Iterator[tuple[str, set[str], Call]]:
    """The tokenizers that a script loads: of which model, the names that hold each, and where."""
    for made in script.called("transformers.AutoTokenizer.from_pretrained", *_OF_FAMILY):
        name = value_of(files, script, made.argument("pretrained_model_name_or_path", 0), made.around)
        held = {
            ast.unparse(target) for node in script.nodes
            if isinstance(node, ast.Assign) and node.value is made.node for target in node.targets
        }  # fmt: skip
        if isinstance(name, str) and held and not made.unpacks and not _is_handed_on(script, held):
            yield name, held, made


def _is_handed_on(script: Script, held: set[str]) -> bool:
    """Whether a function that the file doesn't show gets the tokenizer, and may change it."""
    for call in script.calls:
        given = (*call.node.args, *(each.value for each in call.node.keywords))
        shown = "." not in call.name or call.name.startswith(_SHOWN)
        if not shown and any(isinstance(each, ast.Name) and each.id in held for each in given):
            return True
    return False


_SHOWN = ("transformers.", "trl.", "datasets.", "peft.", "torch.", "accelerate.")


def _is(script: Script, held: set[str], made: Call, call: Call, name: str) -> bool:
    """Whether a name stands for the tokenizer at a call: in the same function, or as it is bound once."""
    once = script.bound(ast.Name(name, ast.Load())) is made.node
    return name in held and (once or call.function is made.function)


@rule(
    "huggingface.embeddings", severity="error", raised_by="torch",
    evidence="torch 2.13 torch.nn.functional.embedding, run; huggingface/transformers 5.24.0, run",
)  # fmt: skip
def embeddings(_plan: Plan | None, files: FileSet, _settings: Settings) -> Iterator[Hit]:
    """Tokens that are added to a tokenizer, and no rows for them in the model's embedding."""
    every = list(scripts(files))
    if any(_RESIZES.search(script.python.text) for script in every):
        return
    for script in every:
        models = [each for each in script.methods("from_pretrained") if ".AutoModelFor" in each.name]
        for name, held, made in _tokenizers(files, script) if len(models) == 1 else ():
            spare = next((rows for pattern, rows in _SPARE.items() if re.fullmatch(pattern, name)), None)
            given = models[0].argument("pretrained_model_name_or_path", 0)
            loaded = value_of(files, script, given, models[0].around)
            if spare is None or loaded != name:
                continue
            adds = script.methods("add_tokens", "add_special_tokens")
            added = [call for call in adds if _is(script, held, made, call, call.owner)]
            count = sum(_added(script, call) for call in added)
            if count > spare:
                message = (
                    f"{count} tokens are new, and the embedding of {name} has {spare or 'no'} rows to spare: "
                    "index out of range, a device-side assert on GPUs, where the first beyond them comes up."
                )
                fix = f"Call model.resize_token_embeddings(len({added[0].owner})) behind it."
                yield script.hit(added[0], message, fix)


_RESIZES = re.compile(r"resize_\w*embedding|setup_chat_format|clone_chat_template|smart_tokenizer")
_SPARE = {
    r"(?:openai-community/)?gpt2(?:-medium|-large|-xl)?|(?:distilbert/)?distilgpt2": 0,
    r"meta-llama/Llama-2-\w+-(?:chat-)?hf|meta-llama/Meta-Llama-3-\w+(?:-Instruct)?": 0,
    r"EleutherAI/pythia-(?:14|31|70|160|410)m(?:-deduped)?|EleutherAI/pythia-1b(?:-deduped)?": 27,
}
"""Rows of the embedding beyond the tokenizer's own tokens: 50304 for 50277 of Pythia."""


def _added(script: Script, call: Call) -> int:
    """How many new tokens a call adds at least: those that are written out, and no token the model has."""
    given = script.bound(call.node.args[0]) if call.node.args else None
    if call.method == "add_special_tokens":
        values = given.values if isinstance(given, ast.Dict) else []
        return sum(_count(script, each) for each in values)
    return _count(script, given)


def _count(script: Script, node: ast.expr | None) -> int:
    found = script.bound(node)
    if isinstance(found, ast.Constant):
        text = found.value if isinstance(found.value, str) else ""
        return int(bool(text) and text not in _HELD)
    if isinstance(found, ast.List | ast.Tuple):
        return len({each.value for each in found.elts if isinstance(each, ast.Constant)} - _HELD)
    if isinstance(found, ast.ListComp) and len(found.generators) == 1 and not found.generators[0].ifs:
        over = found.generators[0].iter
        count = script.constant(over.args[0]) if isinstance(over, ast.Call) and len(over.args) == 1 else None
        by_range = isinstance(over, ast.Call) and script.name(over.func) == "range"
        return count if by_range and type(count) is int and not isinstance(found.elt, ast.Constant) else 0
    return 0


_HELD = frozenset({"<|endoftext|>", "</s>", "<s>", "<unk>", "<|end_of_text|>", "<|eot_id|>", "<|begin_of_text|>",
                   "<|finetune_right_pad_id|>", "<|padding|>"})  # fmt: skip
"""Tokens that these models have."""
