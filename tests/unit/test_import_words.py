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
        ('A=("--x 1" "--y")\npython a.py ${A[@]}', ["--x", "1", "--y"]),
        ("N=8\nM=2\nP=$(($N*$M))\npython a.py --x $P --y $((N / M))", ["--x", "16", "--y", "4"]),
        ("python a.py --x $((N*2))", ["--x", "$((N*2))"]),
        ('A=""\npython a.py --x 1 $A --y', ["--x", "1", "--y"]),
        ('M=a\nif [ "$M" = "a" ]; then\nX=1\nelse\nX=2\nfi\npython a.py --x $X', ["--x", "1"]),
        (
            'M=b\nif [[ $M == "a" ]]\nthen\nX=1\nelif [ $M = b ]; then\nX=2\nelse X=3\nfi\npython a.py --x $X',
            ["--x", "2"],
        ),
        ('N=4\nO=""\nif [ $N -gt 8 ] || [ -n "$O" ]; then O="--y"; fi\npython a.py --x 1 $O', ["--x", "1"]),
        ('X=1\nif [ "$1" = "convert" ]; then X=2; fi\npython a.py --x $X', ["--x", "1"]),
        (
            'X=1\nwhile [[ $# -gt 0 ]]; do\ncase $1 in\n--x)\nX="$2"\n;;\nesac\ndone\npython a.py --x $X',
            ["--x", "1"],
        ),
        ("S=8b\ncase $S in\n7b) L=32 ;;\n8b|9b) L=36 ;;\n*) L=0 ;;\nesac\npython a.py --x $L", ["--x", "36"]),
    ],
)
def test_words(script: str, words: list[str]) -> None:
    assert arguments(script) == words


def test_a_condition_that_is_not_told_is_named() -> None:
    line = command_line('if [ -d "$HOME/x" ]; then\nX=1\nelse\nX=2\nfi\npython a.py --x $X', "run.sh")
    assert (line.arguments, line.doubts) == (("--x", "1"), ('[ -d "$HOME/x" ]',))


def test_several_sbatch_options_on_a_line() -> None:
    line = command_line(
        "#SBATCH <OPTIONS> --nodes=128 --exclusive --ntasks-per-node=8\npython a.py --x", "run.sh"
    )
    assert line.sbatch == (("--nodes", "128"), ("--ntasks-per-node", "8"))


def test_launcher_and_sbatch_options() -> None:
    line = command_line("#SBATCH --nodes=4\n#SBATCH -N 8\ntorchrun --nnodes 2 a.py --x", "run.sh")
    assert (line.script, line.launcher) == ("a.py", ("torchrun", "--nnodes", "2"))
    assert line.sbatch == (("--nodes", "4"), ("-N", "8"))


@pytest.mark.parametrize(
    ("script", "words"),
    [("echo 'a", "No closing quotation"), ("echo hello", "no command"), ("", "no command")],
)
def test_scripts_without(script: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        arguments(script)


def test_nothing_is_run(tmp_path: object) -> None:
    assert arguments("python a.py --x $(touch /nowhere/x) --y `date`")[:1] == ["--x"]
