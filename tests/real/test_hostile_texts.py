"""Texts that are made to be slow to read cost the readers of files bounded time and memory."""

from __future__ import annotations

import resource
import time

import pytest

from dslaunch.files.fileset import FileSet, read_fileset

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hostfile", "".join(f"worker-{i} slots=8\n" for i in range(100_000))),
        ("ds_config.json", "{a: " + "x, " * 1_000_000),
        ("ds_config.json", '{"a": "' + "\\n" * 1_000_000),
        ("ds_config.json", '{"a": ' + "9" * 1_000_000),
        ("ds_config.json", "/*" * 1_000_000),
        ("launch.sh", "#!/bin/sh\n" + "A=" * 400_000),
        ("accelerate.yaml", BOMB),
        ("accelerate.yaml", "a: {" + "b: 1, " * 150_000),
        ("a.yaml", "a: " + "- " * 450_000),
        ("launch.sh", "#!/bin/sh\nA=x\n" + "A=$A$A\n" * 60),
        ("launch.sh", "#!/bin/sh\nA='x x x x'\n" + 'A="$A $A"\n' * 60 + "python t.py $A\n"),
        ("launch.sh", "#!/bin/sh\n" + "A=('" * 200_000),
        ("launch.sh", "#!/bin/sh\n" + "$(" * 450_000),
        ("launch.sh", "#!/bin/sh\n" + "if true; then\n" * 30_000),
        ("launch.sh", "#!/bin/sh\npython t.py " + "--a 1 " * 50_000),
        ("launch.sh", "#!/bin/sh\n" + "cat <<E\n" * 100_000),
        ("train.py", "x = " + "(" * 500_000),
        ("train.py", "x = " + "-" * 200_000 + "1"),
        ("command", "python " * 140_000),
        ("large.py", "x = 1\n" * 400_000),
    ],
    ids=[
        "hosts", "words", "escapes", "digits", "comments", "assignments", "yaml", "yaml-keys", "yaml-depth",
        "doubling", "doubling-words", "arrays", "substitutions", "blocks", "arguments", "heredocs", "brackets",
        "signs", "program", "statements",
    ],
)
def test_hostile_text_is_read_in_bounded_time(name: str, text: str) -> None:
    started = time.process_time()
    (file,) = read_fileset({name: text}).files
    tuple(FileSet((file,)).launches())
    assert time.process_time() - started < 5
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert used < 2_000_000, "KiB: a text of 3 MB at most is read in less than 2 GiB"
