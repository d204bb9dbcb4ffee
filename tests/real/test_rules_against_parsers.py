"""What script.argument says of a command, held against argparse and HfArgumentParser reading the same words."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import sys
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from dslaunch.files.fileset import FileSet, read_fileset
from dslaunch.rules.checking import check
from dslaunch.rules.known import told
from dslaunch.rules.settings import Settings
from tests.real.agreeing import Judged, agree
from tests.real.parts import need

_RULES = ("script.argument", "script.argument-twice", "huggingface.argument")
_KEYWORDS = (
    "", "type=int", "type=float", "type=str", "required=True", "type=int, required=True", "action='store_true'",
    "action='store_false'", "action='count'", "action='append', type=int", "nargs='*'", "nargs='+', type=float",
    "nargs=2", "nargs='?', const='a', default='b'", "choices=['a', 'b']", "type=int, choices=[1, 2]",
    "action=argparse.BooleanOptionalAction", "action='store_const', const=3",
    "type=lambda text: text, default='a'",
)  # fmt: skip
_NAMES = ("--data", "--data-path", "--lr", "--lr_min", "--steps", "--stage", "-q", "--quiet")
_VALUES = ("a", "b", "1", "2", "0.5", "1e-4", "true", "/data/x", "-1", "'a b'")

options = st.tuples(st.sampled_from(_NAMES), st.sampled_from(_KEYWORDS))
words = st.one_of(
    st.sampled_from(_NAMES), st.sampled_from(_VALUES), st.sampled_from(("--dat", "--l", "--step", "--none", "-z")),
    st.tuples(st.sampled_from(_NAMES), st.sampled_from(_VALUES)).map("=".join),
    st.tuples(st.sampled_from(_NAMES), st.sampled_from(_VALUES)).map(" ".join),
)  # fmt: skip


@st.composite
def scripts_and_words(draw: st.DrawFn) -> tuple[str, str]:
    made = draw(st.sampled_from(("", "", "allow_abbrev=False", "add_help=False")))
    added = draw(st.lists(options, min_size=1, max_size=5, unique_by=lambda each: each[0]))
    added += draw(st.lists(st.sampled_from(added), max_size=1)) if draw(st.integers(0, 9)) == 0 else []
    lines = [f"parser.add_argument({name!r}{', ' * bool(words)}{words})" for name, words in added]
    place = draw(st.sampled_from(("", "", "'where'", "'all', nargs='*'")))
    lines += [f"parser.add_argument({place})"] * bool(place)
    parse = draw(st.sampled_from(("parse_args()", "parse_args()", "parse_known_args()")))
    text = "\n".join((
        "import argparse", f"parser = argparse.ArgumentParser({made})", *lines, f"parser.{parse}", ""
    ))
    return text, " ".join(draw(st.lists(words, max_size=5)))


def test_argparse_refuses_what_we_refuse() -> None:
    agree(scripts_and_words(), judged, 1500, 71, share=10)


_FIELDS = ("path: str", "size: int = 3", "kind: str = field(default='a')", "many: bool = False",
           "rate: float = field(metadata={'help': 'x'})", "parts: list[str] = field(default_factory=list)",
           "maybe: Optional[str] = None", "rank_of: int = field(default=8, metadata={'help': 'x'})")  # fmt: skip
_GIVEN = ("--path p", "--size 4", "--kind b", "--many", "--many true", "--rate 0.5", "--parts a b", "--maybe c",
          "--rank_of 1", "--rank-of 1", "--output_dir o", "--learning_rate 1e-4", "--bf16 false", "--other 3",
          "--paths p", "--logging_steps 5", "--ranks 1")  # fmt: skip
_CLASSES = """
from dataclasses import dataclass, field
from typing import Optional

from transformers import HfArgumentParser, TrainingArguments


@dataclass
class Own:
    {fields}


parser = HfArgumentParser((Own, TrainingArguments))
parsed = parser.parse_args_into_dataclasses()
"""


@st.composite
def classes_and_words(draw: st.DrawFn) -> tuple[str, str]:
    chosen = draw(st.lists(st.sampled_from(_FIELDS), min_size=1, max_size=5, unique=True))
    needed = sorted(chosen, key=lambda line: "default" in line or line.endswith(("3", "False", "None")))
    given = draw(st.lists(st.sampled_from(_GIVEN), max_size=6, unique=True))
    return _CLASSES.format(fields="\n    ".join(needed)), " ".join(given)


def test_hf_argument_parser_refuses_what_we_refuse() -> None:
    need("transformers")
    agree(classes_and_words(), judged, 60, 72, share=10)


def judged(example: tuple[str, str]) -> Judged:
    script, line = example
    found = check(None, *_files(script, line))
    return _real(script, line), [f"{each.rule}: {each.message}" for each in found if each.rule in _RULES]


def _files(script: str, line: str) -> tuple[FileSet, Settings]:
    files = read_fileset({"run.sh": f"torchrun --nproc-per-node 2 train.py {line}\n", "train.py": script})
    return files, told(files, Settings())


def _real(script: str, line: str) -> str | None:
    """What stops the script with these words; None where it reads them."""
    space: dict[str, Any] = {"__name__": __name__}
    said = io.StringIO()
    with mock.patch.object(sys, "argv", ["train.py", *shlex.split(line)]), contextlib.redirect_stderr(said):
        try:
            exec(compile(script, "train.py", "exec", dont_inherit=True), space)  # the script is this test's own
        except SystemExit:
            return said.getvalue()
        except (argparse.ArgumentError, TypeError, ValueError) as error:
            return repr(error)
    return None
