"""What a shell script, an sbatch script and a command line become: words with their places, nothing run."""

from __future__ import annotations

import ast
import sys

import pytest

from dslaunch.files import python
from dslaunch.files.commands import CommandLine
from dslaunch.files.fileset import File, read_fileset
from dslaunch.files.position import Position
from dslaunch.files.script import ShellScript

SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2 -J "my job"   # a comment
#SBATCH --gres gpu:8
N=8
GPT_ARGS="
    --num-layers 24 \\
    --hidden-size $((128*N))
"
DATA=(
   --data-path $CORPUS
   # don't read this
   --split 1,2
)
if [ -z "$FAST" ]; then
  GPT_ARGS+=" --bf16"
fi
#SBATCH --time=1:00
srun bash -c "torchrun --nproc_per_node $N --nnodes=$SLURM_NNODES pretrain_gpt.py $GPT_ARGS ${DATA[@]} --lr 1"
"""


def script(text: str) -> ShellScript:
    (file,) = read_fileset({"run.sh": text}).files
    assert isinstance(file.value, ShellScript)
    return file.value


def launch(text: str) -> CommandLine:
    (found,) = script(text).launches
    return found


def flags(found: CommandLine) -> dict[str, tuple[str, ...]]:
    return {flag.name: flag.values for flag in found.arguments.flags}


def test_a_script_of_megatron_with_its_variables_filled_in() -> None:
    found = launch(SCRIPT)
    assert [launcher.program for launcher in found.launchers] == ["srun", "torchrun"]
    torchrun = found.launcher("torchrun")
    assert torchrun
    assert torchrun.options.value("--nproc_per_node") == "8"
    assert torchrun.options.value("--nnodes") == "2"
    assert found.script
    assert found.script.text == "pretrain_gpt.py"
    assert flags(found) == {
        "--num-layers": ("24",), "--hidden-size": ("1024",), "--data-path": ("$CORPUS",), "--split": ("1,2",),
        "--lr": ("1",),
    }  # fmt: skip


def test_each_word_keeps_the_place_where_it_is_written() -> None:
    places = {flag.name: flag.at for flag in launch(SCRIPT).arguments.flags}
    assert places["--hidden-size"] == Position(7, 5)
    assert places["--split"] == Position(12, 4)
    assert places["--lr"] == Position(18, SCRIPT.splitlines()[17].index("--lr") + 1)


def test_what_a_condition_may_add_leaves_the_arguments_open() -> None:
    assert not launch(SCRIPT).arguments.complete
    assert launch("A='--x 1'\npython t.py $A\n").arguments.complete


def test_directives_and_those_that_come_too_late() -> None:
    found = script(SCRIPT)
    assert [(d.name, d.value, d.at, d.read) for d in found.directives] == [
        ("--nodes", "2", Position(2, 9), True), ("-J", "my job", Position(2, 19), True),
        ("--gres", "gpu:8", Position(3, 9), True), ("--time", "1:00", Position(17, 9), False),
    ]  # fmt: skip
    assert found.directive("--time") is None
    nodes = found.directive("-N", "--nodes")
    assert nodes
    assert nodes.value == "2"


@pytest.mark.parametrize(
    ("line", "programs", "program", "arguments"),
    [
        ("deepspeed --num_gpus 2 train.py --lr 1", ["deepspeed"], "train.py", {"--lr": ("1",)}),
        ("/opt/bin/deepspeed --module pkg.train -x", ["deepspeed"], "pkg.train", {"-x": ()}),
        ("python -u -m torch.distributed.run --nproc-per-node=8 t.py", ["torchrun"], "t.py", {}),
        ("python3 -m torch.distributed.launch --use_env t.py a -1", ["torchrun"], "t.py", {}),
        ("python -m deepspeed.launcher.runner --no_python env A=1 bash r.sh", ["deepspeed"], "env", {}),
        ("accelerate launch --config_file a.yaml t.py --b", ["accelerate"], "t.py", {"--b": ()}),
        ("srun -N2 -lu --ntasks 16 python t.py", ["srun", "python"], "t.py", {}),
        ("srun apptainer exec --nv i.sif torchrun --nnodes 2 t.py", ["srun", "torchrun"], "t.py", {}),
        ("mpirun -np 8 --mca btl tcp,self python t.py", ["mpirun", "python"], "t.py", {}),
        ("A=1 nohup torchrun --standalone t.py > log 2>&1 &", ["torchrun"], "t.py", {}),
        ("exec python -m pkg.train --a 1", ["python"], "pkg.train", {"--a": ("1",)}),
        ("CMD='deepspeed t.py --a'; eval $CMD --b", ["deepspeed"], "t.py", {"--a": (), "--b": ()}),
        ("torchrun $DIST t.py --a", ["torchrun"], "t.py", {"--a": ()}),
    ],
)
def test_commands_that_start_programs(
    line: str, programs: list[str], program: str, arguments: dict[str, tuple[str, ...]]
) -> None:
    found = launch(f"{line}\n")
    assert [launcher.program for launcher in found.launchers] == programs
    assert found.script
    assert found.script.text == program
    assert flags(found) == arguments


@pytest.mark.parametrize("line", ["echo deepspeed t.py", "pip install deepspeed", "python -c 'print(1)'", "ls"])
def test_commands_that_start_none(line: str) -> None:
    assert script(f"#!/bin/sh\n{line}\n").launches == ()


def test_options_of_srun_in_short_form() -> None:
    srun = launch("srun -N2 -n 16 -lu python t.py\n").launchers[0]
    assert [(flag.name, flag.values) for flag in srun.options.flags] == [
        ("-N", ("2",)), ("-n", ("16",)), ("-l", ()), ("-u", ()),
    ]  # fmt: skip


def test_what_the_environment_decides_is_not_guessed() -> None:
    found = launch("torchrun --nnodes $NNODES ${EXTRA} t.py --lr ${LR:-1e-4} --out $OUT $MORE\n")
    torchrun = found.launchers[0]
    assert torchrun.options.value("--nnodes") == "$NNODES"
    assert not torchrun.options.complete
    assert flags(found) == {"--lr": ("1e-4",), "--out": ("$OUT",)}
    assert not found.arguments.complete


def test_a_variable_set_differently_by_branches_is_not_told() -> None:
    text = "if [ $1 = 7b ]; then L=32; else L=40; fi\nN=4\npython t.py --layers $L --n $N\n"
    assert flags(launch(text)) == {"--layers": ("$L",), "--n": ("4",)}
    inside = "case $1 in\n 7b) L=32; python t.py --layers $L ;;\nesac\n"
    found = launch(inside)
    assert flags(found) == {"--layers": ("32",)}
    assert found.conditional


def test_a_loop_and_a_function() -> None:
    text = "run() {\n  python t.py --lr $lr\n}\nfor lr in 1 2; do run; done\n"
    found = launch(text)
    assert flags(found) == {"--lr": ("$lr",)}
    assert found.conditional


def test_an_inner_shell_fills_in_late() -> None:
    late = launch("srun bash -c 'torchrun --node_rank $SLURM_NODEID t.py'\n")
    assert late.launcher("torchrun")
    assert late.script
    assert late.script.late
    early = launch('srun bash -c "torchrun --node_rank $SLURM_NODEID t.py"\n')
    assert early.script
    assert not early.script.late


def test_a_heredoc_is_no_command_and_can_be_read_by_itself() -> None:
    text = "sbatch <<EOF\n#!/bin/sh\n#SBATCH -N 2\nsrun python t.py\nEOF\ncat <<'END'\n$A\nEND\npython u.py\n"
    found = script(text)
    assert [launch.script.text for launch in found.launches if launch.script] == ["u.py"]
    heredoc, literal = (command.heredoc for command in found.commands if command.heredoc)
    assert (heredoc.at, heredoc.expands, literal.expands) == (Position(2, 1), True, False)
    (written,) = heredoc.written()
    (inner,) = script(written.text).launches
    assert inner.at == Position(4, 1)


def test_quotes_that_are_not_closed_are_a_problem_with_a_place() -> None:
    (file,) = read_fileset({"run.sh": "N=1\necho 'abc\npython t.py\n"}).files
    assert [(p.rule, p.at) for p in file.problems] == [("file.syntax", Position(2, 6))]


def test_settled_variables() -> None:
    found = script("A=1\nB=$A.$X\nif true; then C=1; fi\nexport D='x y'\n")
    assert [found.variable(name) for name in "ABCD"] == ["1", None, None, "x y"]


def test_a_command_in_a_text_file_is_recognised() -> None:
    (file,) = read_fileset({"command.txt": "CUDA_VISIBLE_DEVICES=1 deepspeed --num_gpus 1 train.py\n"}).files
    assert file.kind == "shell"
    (found,) = file.value.launches
    assert [(a.name, a.value) for a in found.environment] == [("CUDA_VISIBLE_DEVICES", "1")]


def test_megatron_arguments_wherever_they_stand() -> None:
    files = read_fileset({
        "args.txt": "--num-layers 4\n--bf16\n",
        "a.sh": "torchrun pretrain_gpt.py --num-layers 8 --tensor-model-parallel-size 2\n",
        "b.sh": "torchrun train.py --num-layers 8\n",
    })  # fmt: skip
    found = [(file.name, arguments.value("--num-layers")) for file, arguments in files.megatron()]
    assert found == [("args.txt", "4"), ("a.sh", "8")]


def named(name: str, text: str) -> File:
    (file,) = read_fileset({name: text}).files
    return file


def test_deepspeed_env_line_by_line() -> None:
    lines = named(".deepspeed_env", "# c\nA=1\n\nB = 'x y'\n").value
    assert [(line.name, line.value) for line in lines] == [("", ""), ("A", "1"), ("", ""), ("B", "'x y'")]


@pytest.mark.parametrize(
    "text",
    [
        'x = f"{d["a"]}"\ny = 1\n',
        'x = f"{d["a"]:>{n["w"]}} it\'s {{}}" "more"\ny = 1\n',
        'x = f"{"\\n".join(a)}"; y = 1\n',
        "x = f'{f'{f'{1}'}'}'\ny = 1\n",
        'print(f"a {  # why\n\n  1\n}", y)\n',
        'x = rf"""{\na["b"]}"""\ny = 1\n',
    ],
)
def test_f_strings_of_a_newer_python_are_read_past(text: str) -> None:
    script = python.parse(text)
    assert not script.problems
    found = next(node for node in ast.walk(script.tree) if isinstance(node, ast.Name) and node.id == "y")
    before = text[: text.rfind("y")]
    assert (found.lineno, found.col_offset) == (before.count("\n") + 1, len(before) - before.rfind("\n") - 1)


@pytest.mark.parametrize("text", ['x = f"{a"\n', 'x = f"{a["b}"\n', 'print(f"{x["a"]}"\n', 'x = f"{a\n'])
def test_f_strings_that_no_python_reads(text: str) -> None:
    assert [problem.rule for problem in python.parse(text).problems] == ["file.syntax"]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="is read")
@pytest.mark.parametrize("text", ["type Size = int\n", "def f[T](x: T): ...\n", "class A[T]: ...\n"])
def test_a_newer_python_is_said_to_be_one(text: str) -> None:
    (problem,) = python.parse(text).problems
    assert problem.rule == "file.unread"
    assert "3.12" in problem.message


def test_a_python_script_is_a_tree_with_places() -> None:
    file = named("train.py", "import torch\nä = torch.ones(1)\n")
    node = file.value.tree.body[1].value
    assert (file.kind, file.value.at(node)) == ("python", Position(2, 5))
    broken = named("train.py", "def f(:\n")
    assert [(p.rule, p.at.line) for p in broken.problems] == [("file.syntax", 1)]
