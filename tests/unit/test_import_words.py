"""Shell scripts read for their command line: quotes, arrays, variables, comments."""

from __future__ import annotations

import pytest

from dslaunch.errors import ConfigError
from dslaunch.importing.megatron_words import command_line


def arguments(text: str) -> list[str]:
    return list(command_line(text, "run.sh").arguments)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("python a.py --x 1 --y", ["--x", "1", "--y"]),
        ("python a.py --x 1 \\\n  --y 2", ["--x", "1", "--y", "2"]),
        ("A=(--x 1\n  --y 2 # why\n)\npython a.py ${A[@]} --z", ["--x", "1", "--y", "2", "--z"]),
        ('A=(--x "a b")\npython a.py "${A[@]}"', ["--x", "a b"]),
        ("A=(--x 1)\nA+=(--y 2)\npython a.py ${A[@]}", ["--x", "1", "--y", "2"]),
        ('A="--x 1 \\\n --y 2"\npython a.py $A', ["--x", "1", "--y", "2"]),
        ("N=3\npython a.py --x ${N}", ["--x", "3"]),
        ("N=3\nM=$N\npython a.py --x $M", ["--x", "3"]),
        ("python a.py --x ${N:-7}", ["--x", "7"]),
        ("P=${1:-'out'}\npython a.py --x $P/y", ["--x", "out/y"]),
        ("python a.py --x $UNSET", ["--x", "$UNSET"]),
        ("export N=3  # three\npython a.py --x $N", ["--x", "3"]),
        ("python a.py --x 1 2>&1 | tee log", ["--x", "1"]),
        ("python a.py --x 1 > log &", ["--x", "1"]),
        ("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun a.py --x 1", ["--x", "1"]),
        ('srun bash -c "python a.py --x 1"', ["--x", "1"]),
        ("# python old.py --x 0\npython a.py --x 'a#b'", ["--x", "a#b"]),
        ("--x 1\n--y 2", ["--x", "1", "--y", "2"]),
        ("python a.py --x 1\r\n", ["--x", "1"]),
    ],
)
def test_words(script: str, words: list[str]) -> None:
    assert arguments(script) == words


def test_launcher_and_sbatch_options() -> None:
    line = command_line("#SBATCH --nodes=4\n#SBATCH -N 8\ntorchrun --nnodes 2 a.py --x", "run.sh")
    assert (line.script, line.launcher) == ("a.py", ("torchrun", "--nnodes", "2"))
    assert line.sbatch == (("--nodes", "4"), ("-N", "8"))


@pytest.mark.parametrize(
    ("script", "words"), [("echo 'a", "No closing quotation"), ("echo hello", "no command"), ("", "no command")]
)
def test_scripts_without(script: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        arguments(script)


def test_nothing_is_run(tmp_path: object) -> None:
    assert arguments("python a.py --x $(touch /nowhere/x) --y `date`")[:1] == ["--x"]
