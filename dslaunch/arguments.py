"""The command line's words in any order: which is the verb, what are overrides, what belongs to the script."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from dslaunch.errors import ConfigError, listed, nearest

VERBS = {
    "launch": "plan, render, check, write and launch; or launch a rendered folder",
    "plan": "print the plan: layouts, memory, time",
    "render": "write the files that the frameworks get",
    "check": "judge a recipe, a rendered folder, or files written elsewhere",
    "explain": "print a rule's page, or what a symptom may come from",
    "diff": "compare two recipes, rendered folders, runs or revisions",
    "report": "write one HTML file that shows a plan, and a run beside it",
    "preflight": "ask the hosts of a launch how they are, without launching",
    "runs": "list the runs under run.root",
    "status": "say how a run stands: step, speed, ranks, first failure",
    "logs": "show what a run, one rank, or the rank that failed first said",
    "watch": "show a run live, on one terminal page",
    "stop": "end a run, from any shell",
    "resume": "start a run again from its newest checkpoint, in its own folder",
    "triage": "repeat a failing run on one process, and say where the fault is",
    "compare": "put runs side by side",
    "calibrate": "let runs correct the rates that a site's plans are predicted with",
    "convert": "merge a checkpoint of dslaunch's runtime into whole tensors",
    "export": "write a checkpoint's weights as Hugging Face reads them",
    "review": "say what a change of a site's folder does to its plans, for a pull request",
    "import": "make a model or recipe from files of others: hf, deepspeed, megatron, accelerate",
    "init": "write a recipe around a training script",
    "recipes": "list the recipes",
    "models": "list the models",
    "clusters": "list the clusters",
    "schema": "document a key, or list a section's keys",
    "completion": "print the shell's completion script",
}
_QUIET = ("-q", "--quiet")
_VERBOSE = ("-v", "--verbose")
TAKES_VALUE = {
    "-o", "--output", "--config-dir", "--accept", "--fail-on", "--format", "--world-size", "--tp", "--pp",
    "--deepspeed-version", "--component", "--name", "--kind", "--nodes", "--ranks-per-node",
    "--megatron-version", "--select", "--ignore", "--symptom",
    "--comment", "--sarif", "--rank", "--lines", "--attempt", "--every", "--step", "--minutes",
}  # fmt: skip
TAKES_WORDS = {
    "launch", "check", "diff", "report", "compare", "calibrate", "convert", "export", "review", "explain",
    "import", "init", "schema", "completion", "preflight", "status", "logs", "watch", "stop", "resume",
    "triage",
}  # fmt: skip


@dataclass(frozen=True)
class Words:
    """An ordered command line: the verb first."""

    verb: str
    arguments: tuple[str, ...]
    """Options, overrides and the verb's own words, as typed."""
    script_arguments: tuple[str, ...]
    """What follows --."""
    quiet: bool = False
    """-q: the result and mistakes, no notes, no progress."""
    verbose: bool = False
    """-v: each step with its seconds, on standard error."""


def ordered(argv: Sequence[str]) -> Words:
    """The verb is the first bare word; without one it is `launch`, where there are overrides.

    Raises:
        ConfigError: a bare word that is no verb and that the verb does not take.
    """
    for word in argv:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ConfigError(f"{word!a} is not UTF-8. Use a UTF-8 locale, such as LC_ALL=C.UTF-8.")
    typed, after = _split(argv)
    before = [word for word in typed if word not in (*_QUIET, *_VERBOSE)]
    quiet, verbose = (any(word in typed for word in words) for words in (_QUIET, _VERBOSE))
    if quiet and verbose:
        raise ConfigError("-q and -v are both given. Give one.")
    bare = _bare_words(before)
    if bare and before[bare[0]] in VERBS:
        position = bare.pop(0)
        verb, rest = before[position], [*before[:position], *before[position + 1 :]]
    elif bare:
        word = before[bare[0]]
        raise ConfigError(
            f"'{word}' is neither a verb nor KEY=VALUE. Verbs: {listed(VERBS)}.{nearest(word, VERBS)}"
            + (f" For a recipe, write recipe={word}." if not nearest(word, VERBS) else "")
        )
    else:
        verb, rest = "launch", list(before)
    if bare and verb not in TAKES_WORDS:
        raise ConfigError(
            f"'{before[bare[0]]}' is not KEY=VALUE, and `{verb}` takes no other words. "
            "Overrides look like training.global_batch=512."
        )
    return Words(verb, tuple(rest), tuple(after), quiet, verbose)


def paths_and_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words that name files or folders, also `runs/lr=1e-4` and what exists, and the KEY=VALUE ones."""
    is_path = {word: "/" in word.partition("=")[0] or "=" not in word or os.path.lexists(word) for word in words}
    return [word for word in words if is_path[word]], [word for word in words if not is_path[word]]


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _bare_words(words: Sequence[str]) -> list[int]:
    """Positions of words that are neither options, nor an option's value, nor KEY=VALUE."""
    found, skip = [], False
    for position, word in enumerate(words):
        if skip:
            skip = False
        elif word.startswith("-"):
            skip = word in TAKES_VALUE
        elif "=" not in word:
            found.append(position)
    return found
