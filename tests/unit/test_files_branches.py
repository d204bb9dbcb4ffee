"""Branches, loops and functions of a shell script: what a command's words are behind and within them."""

from __future__ import annotations

import pytest

from dslaunch.files.branches import AS_TOLD
from dslaunch.files.script import ShellScript, parse

CASES = {
    "each branch sets the same": ("if x; then N=4; else N=4; fi\nrun $N", "run 4"),
    "one branch alone sets it": ("if x; then N=4; fi\nrun $N", "run $N"),
    "what stood before holds in the other branch": ("N=8\nif x; then N=4; else run $N; fi", "run 8"),
    "a branch that ends the script": ("case $X in a) N=4 ;; *) exit 1 ;; esac\nrun $N", "run 4"),
    "a condition that is told": ("M=a\nif [ $M = a ]; then N=4; else N=2; fi\nrun $N", "run $N"),
    "an inner shell's arguments": ("f() { run bash -c 'x $1' y 2; }\nf 4", "run bash -c x $1"),
    "a branch that isn't taken knows no value of its condition": ("M=a\nif [ $M = b ]; then run $M; fi", "run $M"),
    "a test in front of an assignment": ("N=1\n[ -d x ] && N=2\nrun $N", "run $N"),
    "assignments in a row": ("export N=1 && export M=2\nrun $N $M", "run 1 2"),
    "a function's arguments": ('f() { run $1 "$2"; }\nf 4 "a b"', "run 4 a b"),
    "all of them, behind a shift": ('f() { local n=$1; shift; run $n "$@"; }\nf 4 x y', "run 4 x y"),
    "a default that the call leaves": ("f() { run ${1:-8} ${2:-9}; }\nf 4", "run 4 9"),
    "a shift within a block": ('f() { if x; then shift; fi; run "$1"; }\nf 4', "run $1"),
    "a name of the function's own": ("n=1\nf() { local n=$1; }\nf 4\nrun $n", "run 1"),
    "a script's own arguments": ("run ${1:-8} $2", "run ${1:-8} $2"),
    "a number of nodes that the environment may give": ('NNODES=${WORLD_SIZE:-"1"}\nrun $NNODES', "run $NNODES"),
    "a function that calls itself": ("f() { run $1; f $1; }\nf 4", "run 4"),
    "an empty variable is no word": ("A=\nrun a $A b", "run a b"),
}


@pytest.mark.parametrize("case", CASES)
def test_words_of_the_command(case: str) -> None:
    text, expected = CASES[case]
    assert _run(parse(text)) == expected


def _run(script: ShellScript) -> str:
    found = [" ".join(word.text for word in each.words) for each in script.commands]
    return next(each for each in found if each.startswith("run"))


def test_each_choice_is_read_by_itself_and_not_where_its_condition_may_be_asked_again() -> None:
    text = "if [ $A = 1 ]; then N=4; else N=2; fi\nrun $N\nif [ $A = 1 ]; then\nagain $N\nfi\n"
    script = parse(text)
    assert _run(script) == "run $N"
    assert [_run(parse(text, (), choice)) for choice in sorted(script.choices)] == ["run 4", "run 2"]
    again = [each for each in parse(text, (), min(script.choices)).commands if each.words[0].text == "again"]
    assert again[0].words[1].text == "$N"


@pytest.mark.parametrize("text", [
    'M=a\nif [ "$M" = a ]; then N=4; else N=2; fi\nrun $N',
    "M=ab\ncase $M in a*) N=4 ;; *) N=2 ;; esac\nrun $N",
    "M=3\nif [[ $M -gt 3 ]]; then N=2; elif [[ $M != 2 ]]; then N=4; fi\nrun $N",
])  # fmt: skip
def test_branch_that_is_told(text: str) -> None:
    (choice,) = parse(text).choices
    assert choice == AS_TOLD
    assert _run(parse(text, (), choice)) == "run 4"


def test_options_of_read_are_no_variables() -> None:
    script = parse('f() { x "$1"; }\nfind . | while read -r name; do\n  f "$name" "$dest"\ndone\nrun a\n')
    assert _run(script) == "run a"


def test_passes_of_a_loop_are_choices_unless_it_leaves_some_out() -> None:
    assert len(parse("for i in 1 2 3; do run $i; done").choices) == 3
    assert not parse("for i in 1 2 3; do [ $i = 2 ] && continue; run $i; done").choices


def test_functions_that_call_each_other_many_times_are_read_in_bounds() -> None:
    text = "".join(f"f{n + 1}() {{ f{n}; f{n}; f{n}; }}\n" for n in range(500)) + "f500\n"
    assert len(parse(text).commands) < 100_000
