"""Megatron's flags one by one: unknown, gone, mistyped, repeated, deprecated, or missing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from dslaunch.engines.megatron_catalogue import (
    Argument,
    Catalogue,
    megatron_versions,
)
from dslaunch.errors import listed, nearest
from dslaunch.files.fileset import FileSet
from dslaunch.files.flags import Flag, is_told
from dslaunch.planfile import Plan
from dslaunch.rules.megatron.demands import ARGUMENTS, RUN
from dslaunch.rules.megatron.forks import FORK, OF_PROGRAMS, STOCK, catalogue_of, foreign, of_fork
from dslaunch.rules.megatron.run import Run, runs, stock_runs, where_told
from dslaunch.rules.registry import Edit, Hit, rule
from dslaunch.rules.settings import Settings

_PARSER = (
    f"NVIDIA/Megatron-LM:megatron/training/arguments.py parse_args at {RUN}; deepspeedai/Megatron-DeepSpeed"
)
_REDIRECTION = re.compile(r"\d*>|&|\||<$")
"""A command kept as text in a variable may end with one; `<some folder>` is a value to be filled in."""
_TYPES: Mapping[str, type] = {"int": int, "float": float}


@rule("megatron.unknown-flag", severity="error", raised_by="megatron", evidence=_PARSER, framework="megatron")
def unknown(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A flag that this Megatron's parser doesn't have: it prints its usage and exits."""
    for run in runs(files, settings):
        catalogue = catalogue_of(run)
        stock, alien = run.program in STOCK, foreign(run, catalogue)
        aliens = {flag.name for flag in alien}
        if len(alien) >= FORK and stock:
            names = listed(sorted(aliens), limit=6)
            message = f"{_known(catalogue)} has no {names}: it exits, unless this is a fork or an older version."
            fix = "Check what the fork's own parser takes; its values were not checked here."
            yield run.hit_at(alien[0], message, fix, severity="info")
        for flag in run.arguments.flags:
            known = flag.name in catalogue.arguments or flag.name in OF_PROGRAMS or not is_told(flag.name)
            if known or (len(alien) >= FORK and flag.name in aliens):
                continue
            if message := _unknown(run, flag, catalogue, stock):
                near = nearest(flag.name, catalogue.arguments)
                own = flag.name in aliens and not run.version
                message += " A fork, or an older version, may have it." if own else ""
                yield run.hit_at(
                    flag, message, f"Take it out.{near}", severity="info" if own else None,
                    edit=_spelling(flag, near, catalogue),
                )  # fmt: skip


def _known(catalogue: Catalogue) -> str:
    """The framework, with the versions whose flags are known."""
    name = catalogue.framework.partition(" core")[0]
    versions = megatron_versions()
    return name if name == "Megatron-DeepSpeed" else f"{name} (core {versions[0]} to {versions[-1]})"


def _unknown(run: Run, flag: Flag, catalogue: Catalogue, stock: bool) -> str:
    """What is wrong with a flag that isn't in the catalogue; empty where a program may have it itself."""
    others = catalogue.others_with(flag.name)
    if others and not run.version:
        return ""
    if others:
        return f"{catalogue.framework} has no {flag.name}: core {others} has it. The parser exits."
    if stock:
        return f"{_known(catalogue)} has no {flag.name}; the parser exits."
    return ""


def _spelling(flag: Flag, near: str, catalogue: Catalogue) -> Edit | None:
    """The right spelling where only dashes, underscores or case differ."""
    folded = {name.replace("_", "-").lower(): name for name in catalogue.arguments}
    right = folded.get(flag.name.replace("_", "-").lower())
    return Edit(flag.at, flag.name, right) if right and right in near else None


@rule("megatron.value", severity="error", raised_by="megatron", evidence=_PARSER, framework="megatron")
def value(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A value of the wrong type, outside the choices, too many, or none."""
    for run in runs(files, settings):
        catalogue = catalogue_of(run)
        if len(foreign(run, catalogue)) >= FORK:
            continue
        for flag in run.arguments.flags:
            argument = catalogue.arguments.get(flag.name)
            versions = (argument,) if run.version else catalogue.elsewhere.get(flag.name, ())
            faults = [_fault(flag, each) for each in versions if each]
            if faults and all(faults):
                found = run.hit_at(flag, f"{flag.name}: {faults[-1]}; the parser exits.", "Correct the value.")
                other = run.program not in STOCK and not run.program.startswith("pretrain")
                own = _CHOSEN in faults[-1] and (other or not _FORKS_HAVE.isdisjoint(flag.values))
                yield replace(found, severity="info") if own else found  # it may add choices of its own


_CHOSEN = " is none of "
_FORKS_HAVE = frozenset({"PretrainedFromHF", "TokenizerFromFile", "TokenizerFromFileWithFIM", "alibi"})
"""Choices that forks have added (bigscience-workshop/Megatron-DeepSpeed, bigcode-project/Megatron-LM)."""


def _fault(flag: Flag, argument: Argument) -> str:
    """What the parser says of the values; empty where it takes them."""
    values = tuple(takewhile(lambda each: not _REDIRECTION.match(each), flag.values))
    if _is_gap(values):
        return ""
    if argument.nargs == "0":
        return f"it takes no value, and {values[0]!r} follows" if values and is_told(values[0]) else ""
    if not values:
        return "" if argument.nargs in ("*", "?") else "its value is missing"
    wanted = 1 if not argument.nargs else int(argument.nargs) if argument.nargs.isdecimal() else 0
    if wanted and len(values) != wanted and all(is_told(each) for each in values):
        return f"it takes {wanted} value{'s' if wanted > 1 else ''}, and {' '.join(values)} stands there"
    return next((fault for each in values[: wanted or None] if (fault := _value_fault(each, argument))), "")


def _is_gap(values: Sequence[str]) -> bool:
    """Whether these are the words of `<what the reader is to fill in>`."""
    return any(value.startswith("<") or value.endswith(">") or value.lower() == "your" for value in values)


def _value_fault(text: str, argument: Argument) -> str:
    if not is_told(text):
        return ""
    kind = _TYPES.get(argument.type)
    if kind is not None:
        try:
            kind(text)
        except ValueError:
            return f"{text!r} is no {'whole number' if kind is int else 'number'}"
    choices = {str(choice) for choice in argument.choices}
    typed = argument.type in ("", "str", "int")
    return (
        f"{text!r}{_CHOSEN}{listed(sorted(choices))}" if choices and typed and text not in choices else ""
    )


@rule("megatron.repeated-flag", severity="wrong", raised_by="nobody", evidence=_PARSER, framework="megatron")
def repeated(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A flag that stands twice with different values: the last one counts."""
    for run in runs(files, settings):
        first: dict[str, Flag] = {}
        for flag in run.arguments.flags:
            before = first.setdefault(flag.name, flag)
            both = (*before.values, *flag.values)
            if before.values != flag.values and all(is_told(each) for each in both) and not _is_gap(both):
                message = (
                    f"{flag.name} is {' '.join(flag.values)} here and {' '.join(before.values)} in line "
                    f"{before.at.line}; argparse takes the last one without a word."
                )
                yield run.hit_at(flag, message, "Keep one.")


_REQUIRED = (
    ("--num-layers", "--encoder-num-layers"), ("--hidden-size",), ("--num-attention-heads",),
    ("--max-position-embeddings",), ("--micro-batch-size",), ("--seq-length", "--encoder-seq-length"),
)  # fmt: skip
_OF_RETRO = ("--max-position-embeddings", "--seq-length")
"""What load_retro_config takes from the project's folder (megatron/training/arguments.py, core 0.8 to 0.12)."""


@rule(
    "megatron.missing-flag", severity="error", raised_by="megatron", evidence=f"{ARGUMENTS} at {RUN}",
    framework="megatron",
)  # fmt: skip
def missing(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A flag that Megatron can't do without isn't on its command line."""
    for run in runs(files, settings):
        if run.program and run.program in STOCK and run.whole and not run.on("--use-legacy-models"):
            of_folder = _OF_RETRO if run.on("--retro-project-dir") else ()
            absent = (names[0] for names in _REQUIRED if names[0] not in of_folder and not run.on(*names))
            stops = "isn't given; Megatron stops at start-up."
            yield from of_fork(run, (run.hit((), f"{name} {stops}", f"Add {name}.") for name in absent))


_TOKENIZERS: Mapping[str, tuple[str, ...]] = {
    "GPT2BPETokenizer": ("--vocab-file", "--merge-file"),
    "BertWordPieceLowerCase": ("--vocab-file",),
    "BertWordPieceCase": ("--vocab-file",),
    "SentencePieceTokenizer": ("--tokenizer-model",),
    "GPTSentencePieceTokenizer": ("--tokenizer-model",),
    "HuggingFaceTokenizer": ("--tokenizer-model",),
    "Llama2Tokenizer": ("--tokenizer-model",),
    "TikTokenizer": ("--tokenizer-model",),
    "NullTokenizer": ("--vocab-size",),
}


@rule(
    "megatron.tokenizer", severity="error", raised_by="megatron", framework="megatron", until="0.16.1",
    evidence="NVIDIA/Megatron-LM:megatron/training/tokenizer/tokenizer.py build_tokenizer at core_v0.12.3 to "
    "core_v0.16.1",
)  # fmt: skip
def tokenizer(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A tokenizer without the files that it reads."""
    for run in stock_runs(files, settings):
        yield from where_told(_lacking(run))


def _lacking(run: Run) -> Iterator[Hit]:
    kind = run.text("--tokenizer-type")
    for flag in _TOKENIZERS.get(kind, ()):
        if not run.on(flag):
            yield run.hit("--tokenizer-type", f"--tokenizer-type {kind} without {flag}.", f"Add {flag}.")


_DEPRECATED: Mapping[str, str] = {
    "--use-dist-ckpt": "it does nothing; --ckpt-format chooses",
    "--dist-ckpt-format": "it does nothing; --ckpt-format chooses",
    "--ckpt-fully-parallel-save": "it does nothing; parallel saving is the default",
    "--use-mcore-models": "it does nothing; megatron-core's models are the default",
    "--use-rotary-position-embeddings": "--position-embedding-type rope replaces it",
    "--moe-enable-deepep": "--moe-flex-dispatcher-backend deepep replaces it (core 0.16 and newer)",
    "--moe-layer-recompute": "--recompute-granularity selective --recompute-modules moe replaces it",
    "--moe-router-padding-for-fp8": "--moe-router-padding-for-quantization replaces it (core 0.16 and newer)",
    "--enable-cuda-graph": "--cuda-graph-impl local replaces it (core 0.15 and newer)",
    "--external-cuda-graph": "--cuda-graph-impl transformer_engine replaces it (core 0.15 and newer)",
    "--tiktoken-special-tokens": "--tokenizer-special-tokens replaces it (core 0.16 and newer)",
    "--no-weight-decay-cond-type": "--apply-wd-to-qk-layernorm replaces it (core 0.16 and newer)",
}
_REMOVED: Mapping[str, str] = {
    "--checkpoint-activations": "--recompute-activations",
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
}


_KEPT = "--checkpoint-activations"
"""Megatron-DeepSpeed takes it still; a script may add --deepspeed in a branch of its own."""


@rule(
    "megatron.deprecated-flag", severity="deprecated", raised_by="nobody", evidence=f"{ARGUMENTS} at {RUN}",
    framework="megatron",
)  # fmt: skip
def deprecated(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A flag that does nothing any more, that another one replaces, or that only stops the program."""
    for run in stock_runs(files, settings):
        for flag in run.arguments.flags:
            if flag.name in _DEPRECATED:
                yield run.hit_at(flag, f"{flag.name} is deprecated: {_DEPRECATED[flag.name]}.", "Replace it.")
            elif flag.name in _REMOVED and not (flag.name == _KEPT and "--deepspeed" in run.file.text):
                instead = _REMOVED[flag.name]
                message = f"{flag.name} is only there to say that {instead} replaces it; Megatron stops."
                if not run.version:
                    message = f"{message} Releases before megatron-core took it."
                fix = f"Use {instead}."
                yield run.hit_at(flag, message, fix, severity="error" if run.version else "deprecated")
