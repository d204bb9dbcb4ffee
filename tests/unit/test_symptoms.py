"""`dslaunch explain --symptom TEXT`: from what a user sees to causes, checks and rules."""

from __future__ import annotations

import re
import time

import pytest

from dslaunch.rules.registry import rules
from dslaunch.rules.symptoms import _patterns, matching, symptoms
from tests.command import CommandLine

MESSAGES = [(symptom.id, message) for symptom in symptoms() for message in symptom.messages]


def varied(message: str) -> str:
    """The message as another run would print it."""
    other = re.sub(r"\d+", lambda match: str(int(match[0]) + 7), message)
    return re.sub(r"(?<![\w<])(?:node\d+)", "gpu-alpha-17", other)


@pytest.mark.parametrize(("symptom", "message"), MESSAGES)
def test_a_message_in_a_log_is_its_symptom(symptom: str, message: str) -> None:
    line = f"\x1b[31m[2026-01-31 10:00:00,123] [ERROR] [rank17]: {varied(message)}\x1b[0m"
    log = f"Epoch 1: 3%\n{line}\nTraceback (most recent call last):\n"
    assert matching(log)[0].id == symptom


@pytest.mark.parametrize(
    ("words", "symptom"),
    [
        ("NCCL timeout", "nccl-timeout"),
        ("exit -9", "exit-minus-9"),
        ("hang at initialisation", "init-hang"),
        ("batch assertion", "batch-assertion"),
        ("OOM only when distributed", "distributed-oom"),
        ("one rank lost", "rank-lost"),
        ("loss spike", "loss-spike"),
        ("low or uneven utilisation", "uneven-utilisation"),
        ("training slower than expected", "slow"),
        ("worse convergence than on one GPU", "worse-convergence"),
        ("irreproducible", "irreproducible"),
        ("checkpoint inconsistent", "checkpoint-inconsistent"),
        ("log flood", "log-flood"),
    ],
)
def test_what_users_say_without_a_message(words: str, symptom: str) -> None:
    assert matching(words)[0].id == symptom


def test_every_symptom_says_what_to_do_and_names_rules_that_there_are() -> None:
    assert len(symptoms()) >= 25
    for symptom in symptoms():
        assert symptom.causes, symptom.id
        assert symptom.checks, symptom.id
        assert symptom.source, symptom.id
        assert symptom.messages or symptom.words, symptom.id
        assert all(weight >= 8 for weight, _ in _patterns(symptom)), symptom.id
        assert set(symptom.rules) <= set(rules()), symptom.id


def test_it_prints_causes_checks_and_rules(dslaunch: CommandLine) -> None:
    ran = dslaunch("explain", "--symptom", "AssertionError: Check batch related parameters. 8 != 2 * 1 * 1")
    assert ran.status == 0
    assert "may come from:" in ran.out
    assert "find out:" in ran.out
    assert f"batch.triangle: {rules()['batch.triangle'].summary}" in ran.out


def test_a_text_that_says_nothing_lists_what_is_known(dslaunch: CommandLine) -> None:
    ran = dslaunch("explain", "--symptom", "lorem ipsum")
    assert ran.status == 0
    assert ran.out.startswith("No symptom that is known fits this text.")
    assert all(symptom.title in ran.out for symptom in symptoms())


def test_a_large_log_is_read_in_bounded_time() -> None:
    log = "step 1 loss 2.0 /a/b/c\n" * 400_000 + "Signal 9 (SIGKILL) received by PID 4\n"
    started = time.process_time()
    assert matching(log)[0].id == "exit-minus-9"
    assert time.process_time() - started < 10
