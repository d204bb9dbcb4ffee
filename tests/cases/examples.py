"""The examples on the rules' pages as a user has them: files, and the options of `dslaunch check` beside them.

An example in `json`, `yaml`, `sh` or `python` is a file; one in `text` is several, where a line `# NAME` stands
before each, or else an excerpt, which tells too little to be checked. `...` stands for the sizes of a Megatron
model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dslaunch.rules import page
from dslaunch.rules.settings import Settings

_EXAMPLE = re.compile(r"## (Bad|Good)\n\n```(\w+)\n(.*?)```", re.DOTALL)
_OPTIONS = re.compile(r"^The examples are for `([^`]+)`\.$", re.MULTILINE)
_HEAD = re.compile(r"^# ([\w./-]+\.(?:env|json|yaml|sh|py)|hostfile|ds_env|[\w/]*\.deepspeed_env)\n", re.MULTILINE)
_NAMES = {"json": "ds_config.json", "python": "train.py", "yaml": "accelerate.yaml"}
_SIZES = {
    "--num-layers": "8", "--hidden-size": "256", "--num-attention-heads": "8", "--seq-length": "1024",
    "--max-position-embeddings": "4096", "--micro-batch-size": "1", "--global-batch-size": "64", "--lr": "1e-4",
    "--tokenizer-type": "NullTokenizer", "--vocab-size": "32000",
}  # fmt: skip
"""What Megatron asks for, where an example says `...`."""


@dataclass(frozen=True)
class Example:
    """One of the two of a page."""

    bad: bool
    files: dict[str, str]
    """Empty for an excerpt."""
    settings: Settings


def examples(rule_id: str) -> list[Example]:
    """The bad one and the good one of a rule's page."""
    text = page(rule_id)
    options: dict[str, Any] = dict(_options(text))
    settings = Settings(**options)
    return [
        Example(kind == "Bad", _files(language, example), settings)
        for kind, language, example in _EXAMPLE.findall(text)
    ]


def _options(text: str) -> Iterator[tuple[str, str | int]]:
    """The options that the page names, as fields of `Settings`."""
    match = _OPTIONS.search(text)
    words = match[1].split() if match else []
    for name, value in zip(words[::2], words[1::2], strict=True):
        yield name.removeprefix("--").replace("-", "_"), int(value) if value.isdigit() else value


def _files(language: str, example: str) -> dict[str, str]:
    example = _filled(example)
    if _HEAD.match(example):
        parts = _HEAD.split(example)[1:]
        return dict(zip(parts[::2], parts[1::2], strict=True))
    if language in ("sh", "bash") or (language == "text" and "pretrain_gpt.py --num" in example):
        return {"job.sbatch" if "#SBATCH" in example else "run.sh": example}
    return {_NAMES[language]: example} if language != "text" else {}


def _filled(example: str) -> str:
    sizes = " ".join(f"{flag} {value}" for flag, value in _SIZES.items() if f"{flag} " not in example)
    return example.replace("pretrain_gpt.py ...", f"pretrain_gpt.py {sizes}")
