"""What Megatron-DeepSpeed refuses behind its arguments: tokenizers without files, experts of uneven shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dslaunch.files.fileset import FileSet
from dslaunch.planfile import Plan
from dslaunch.rules.megatron.run import Run, deepspeed_runs, where_told
from dslaunch.rules.megatron.sizes import Fault
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_SOURCE = "deepspeedai/Megatron-DeepSpeed:megatron"
_TYPE, _MODEL, _VOCABULARY = "--tokenizer-type", "--tokenizer-model", "--vocab-file"
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "BertWordPieceLowerCase": (_VOCABULARY,),
    "BertWordPieceCase": (_VOCABULARY,),
    "GPT2BPETokenizer": (_VOCABULARY, "--merge-file"),
    "SentencePieceTokenizer": (_MODEL,),
    "GPTSentencePieceTokenizer": (_MODEL,),
    "HFTokenizer": (_MODEL,),
    "NullTokenizer": ("--vocab-size",),
}
_EXPERTS, _SHARED = "--num-experts", "--moe-expert-parallel-size"


@rule(
    "megatron-deepspeed.tokenizer", severity="error", raised_by="megatron",
    evidence=f"{_SOURCE}/tokenizer/tokenizer.py build_tokenizer, 4efb479, DeepSpeed 0.19",
)  # fmt: skip
def tokenizer(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A tokenizer of Megatron-DeepSpeed's without the files that it reads."""
    for run in deepspeed_runs(files, settings):
        yield from (run.hit(*fault) for fault in where_told(_lacking(run)))


def _lacking(run: Run) -> Iterator[Fault]:
    kind = run.text(_TYPE)
    for flag in _NEEDS.get(kind, ()):
        if not run.on(flag):
            yield _TYPE, f"{kind} without {flag}: AssertionError at start-up.", f"Add {flag}."


@rule(
    "megatron-deepspeed.experts", severity="error", raised_by="deepspeed",
    evidence=f"{_SOURCE}/model/transformer.py get_num_experts_per_layer, 4efb479; deepspeedai/DeepSpeed:"
    "deepspeed/moe/layer.py, utils/groups.py 0.16.0 to 0.19.8", since="0.16.0",
)  # fmt: skip
def experts(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """Experts of Megatron-DeepSpeed that their ranks can't share, or not one number for each layer of them."""
    for run in deepspeed_runs(files, settings):
        for faults in (_shares, _groups, _layers):
            yield from (run.hit(*fault) for fault in where_told(faults(run)))


def _counts(run: Run) -> list[int]:
    """Experts by layer, or of all; none where Megatron's own kind is chosen, or one isn't a number."""
    values = run.texts(_EXPERTS, ("1",))
    own = run.on("--num-experts-switch") or not all(value.isdecimal() for value in values)
    return [] if own else [int(value) for value in values]


def _shares(run: Run) -> Iterator[Fault]:
    ranks = run.size(_SHARED, 1)
    for count in _counts(run) if ranks > 0 else ():
        if count > 1 and count % ranks:
            message = f"{count} experts aren't shared evenly by {_SHARED} {ranks}: AssertionError in the model."
            yield (_EXPERTS, _SHARED), message, f"Use a size that divides {count}."
            return


def _groups(run: Run) -> Iterator[Fault]:
    ranks, stage = run.size(_SHARED, 1), run.world // run.pp
    if max(_counts(run), default=1) > 1 and ranks > 0 and stage % ranks:
        message = f"{_SHARED} {ranks} doesn't divide the {stage} ranks of a stage: AssertionError."
        yield _SHARED, message, f"Use a divisor of {stage}."


def _layers(run: Run) -> Iterator[Fault]:
    counts, every = _counts(run), run.size("--expert-interval", 2)
    if len(counts) > 1 and every > 0 and run.on("--no-pipeline-parallel"):
        layers = run.size("--num-layers") // every
        if len(counts) != layers:
            message = f"{len(counts)} numbers of experts for {layers} layers with experts: AssertionError."
            yield _EXPERTS, message, f"Write one number, or {layers}."
