"""Command lines of Megatron's forks: what the stock parser doesn't know, and how sure its checks are there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import islice

from dslaunch.engines.megatron_catalogue import (
    Catalogue,
    megatron_catalogue,
    megatron_deepspeed_catalogue,
    megatron_versions,
)
from dslaunch.files.flags import Flag, is_told
from dslaunch.rules.megatron.run import Run
from dslaunch.rules.registry import Hit
from dslaunch.rules.slips import is_slip

STOCK = frozenset({
    "pretrain_gpt.py", "pretrain_bert.py", "pretrain_t5.py", "pretrain_mamba.py", "pretrain_hybrid.py",
    "pretrain_retro.py", "pretrain_ict.py", "pretrain_vision_classify.py", "",
})  # fmt: skip
"""Megatron's own programs, whose parser takes the catalogue alone; an argument file is for one of them."""
OF_PROGRAMS = frozenset({
    "--local_rank", "--local-rank",
    "--encoder-tp", "--encoder-dp", "--llm-offset", "--llm-tp", "--llm-cp", "--llm-pp", "--llm-dp", "--llm-ep",
    "--freeze-vit", "--freeze-projection", "--freeze-lm", "--image-seq-length",
})  # fmt: skip
"""What launchers add, and what examples/mimo adds to the parser (NVIDIA/Megatron-LM core_v0.19.0:
examples/mimo/training/args.py)."""
_OF_VLM = frozenset({
    "--disable-vision-class-token", "--dataloader-seq-length", "--decoder-tp-comm-overlap",
    "--use-packed-sequence",
})  # fmt: skip
"""What pretrain_vlm.py adds (core_v0.12.3 to core_v0.19.0)."""
_OF_MULTIMODAL = frozenset({
    "--allow-missing-vision-projection-checkpoint", "--dataloader-save", "--dataloader-seq-length",
    "--dataset-config", "--disable-vision-class-token", "--eos-id", "--force-system-message", "--freeze-LM",
    "--freeze-ViT", "--image-tag-type", "--language-model-type", "--max-num-tiles", "--num-frames",
    "--online-evaluation-config", "--packing-buffer-size", "--packing-seq-length", "--pixel-shuffle",
    "--prompt-path", "--recompute-vision", "--special-tokens", "--tokenizer-prompt-format",
    "--use-area-weighted-aspect-ratio", "--use-loss-scaling", "--use-mcore-inference", "--use-te",
    "--use-thumbnail", "--use-tile-tags", "--use-tiling", "--vision-model-type",
})  # fmt: skip
"""What examples/multimodal adds (core_v0.16.1: multimodal_args.py), which has --language-model-type."""
FORK = 3
"""Flags of no version, and no slips of the pen, from which on a script is taken to be for a fork."""
_UNDERSCORED = 5
"""Flags with underscores from which on, where next to none has dashes, the parser isn't Megatron's own."""
_LOOKED_AT = 50
_NEAR = 0.85
"""How near (difflib) a flag is to one that there is where it is misspelt: one letter in ten."""


def catalogue_of(run: Run) -> Catalogue:
    """The arguments of the run's framework and version; the newest where the version isn't known."""
    if run.is_deepspeed:
        return megatron_deepspeed_catalogue()
    return megatron_catalogue(run.version if run.version in megatron_versions() else megatron_versions()[-1])


def foreign(run: Run, catalogue: Catalogue) -> list[Flag]:
    """The flags, each once, of no version and no slips either, among the first `_LOOKED_AT` unknown."""
    names = {flag.name: flag for flag in reversed(run.arguments.flags) if is_told(flag.name)}
    names = dict(reversed(names.items()))  # where each stands first
    known = catalogue.arguments.keys() | catalogue.elsewhere.keys() | OF_PROGRAMS
    known |= _OF_VLM if run.program == "pretrain_vlm.py" else frozenset()
    known |= _OF_MULTIMODAL if "--language-model-type" in names else frozenset()
    unknown = islice((flag for name, flag in names.items() if name not in known), _LOOKED_AT)
    own_parser = sum("_" in name for name in names) >= _UNDERSCORED and sum("-" in name[2:] for name in names) < 2
    own = frozenset(catalogue.arguments)
    return [flag for flag in unknown if own_parser or not _is_near(flag.name, own)]


@lru_cache(maxsize=4096)
def _is_near(name: str, known: frozenset[str]) -> bool:
    """Whether a flag is another one, misspelt. The rules ask it of the same flags again and again."""
    return any(is_slip(name, each) for each in get_close_matches(name, known, n=3, cutoff=_NEAR))


def of_fork(run: Run, hits: Iterator[Hit]) -> Iterator[Hit]:
    """The findings on a run; those of a fork, which may have other checks, as information."""
    found = list(hits)
    alien = len(foreign(run, catalogue_of(run))) if found else 0
    for hit in found:
        if alien >= FORK or (alien and run.program not in STOCK):
            message = f"{hit.message} That is said of stock Megatron: a fork may take it."
            yield replace(hit, severity="info", message=message, edit=None)
        else:
            yield hit
