"""Blocks of shell scripts, held against what `bash -n` says of the same text."""

from __future__ import annotations

import subprocess

import pytest

from dslaunch.files.blocks import fault

SCRIPTS = (
    "if a; then\n  b\n",
    "for x in 1 2; do\n echo $x\n",
    "case $x in\n a) echo if ;;\n b|c) if y; then z; fi ;;\nesac\n",
    "f() {\n echo\n}\nfunction g {\n echo\n}\n",
    "f() {\n echo\n",
    "while read l; do echo; done < f\n",
    "fi\n",
    "if a; then b; done\n",
    "if a; then\n for x in 1; do\n b\n fi\n",
    "(if a; then b; fi)\n",
    "for ((i=0;i<3;i++)); do echo; done\n",
    "for ((;;)); do echo; done\n",
    "[[ -n $x && $y == done ]] && { echo; }\n",
    "for i in if done; do :; done\n",
    "x=(\n done\n fi\n)\n",
    "select a in b c; do break; done\n",
    "for x\ndo echo; done\n",
    "for x in 1; { echo; }\n",
    "for x in 1; do if a; then b\nfi done\n",
    "if [ a ]; then\ncat <<EOF\nfi\nEOF\nfi\n",
    "if [ a ]; then\ncat <<EOF\nfi\nEOF\n",
    "case x in if) a;; esac\n",
    "case $1 in (a) b;; esac; if true; then echo; fi\n",
    "case x in\na) b\n",
    "! { a; }\n",
    "time { a; }\n",
    "for i in 1; do { a; } & done\n",
    "for i in 1; do a &; done\n",
    "a & \nb\n",
    "until a; do b; done; }\n",
    "echo fi; echo $(if a; then b; fi) > done\n",
    "if a\nthen b\nelif c\nthen d\nelse e\nfi 2>&1 | tee log\n",
    "# if\necho 'for x in' \\\n  done\n",
)  # fmt: skip


@pytest.mark.parametrize("text", SCRIPTS)
def test_told_where_bash_stops(text: str) -> None:
    bash = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (fault(text) is None) == (bash.returncode == 0), (fault(text), bash.stderr)


def test_the_block_that_lacks_its_end_is_named() -> None:
    assert fault("for h in a b; do\n  if x; then\n    y\n  done\n") == (
        "`done`, and the `if` in line 2 has no `fi` yet: bash stops at it", 38
    )  # fmt: skip


def test_other_shells_have_other_blocks() -> None:
    assert fault("#!/bin/tcsh\nif ($x == 1) then\n  echo\nendif\n") is None
    assert fault("#!/usr/bin/env bash\nif x; then\n") is not None
