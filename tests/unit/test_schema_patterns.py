"""What is said of a text that doesn't match its pattern: of that pattern, and without what may be a secret."""

from __future__ import annotations

import pytest

from tests.command import CommandLine

NAME = "the name of an environment variable: letters, digits and _, and begins with no digit"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("notify.webhook=8NAME", f"notify.webhook: is '8NAME'; it takes {NAME}."),
        ("name=a/b", "name: is 'a/b'; it takes letters, digits, _ . + -, and begins with a letter or digit."),
    ],
)
def test_each_pattern_is_told_in_its_own_words(dslaunch: CommandLine, word: str, said: str) -> None:
    ran = dslaunch("plan", "recipe=llama3_8b", "cluster=16xH100", word)
    assert ran.status == 2
    assert said in ran.err


def test_an_address_is_not_repeated(dslaunch: CommandLine) -> None:
    ran = dslaunch("plan", "recipe=llama3_8b", "cluster=16xH100", "notify.webhook=https://chat.example/services/T0/B0/k3y")
    assert ran.status == 2
    assert "notify.webhook: is an address" in ran.err
    assert "k3y" not in ran.err + ran.out
