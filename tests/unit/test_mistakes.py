"""What a hurried user gets wrong: one clear message, exit status 2 or 3, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import RECIPE, CommandLine, make_site

VLA = "plan recipe=vla70b cluster=64xA100"

MISTAKES = [
    # (words, exit status, what the message must hold)
    (f"{VLA} training.global_bach=512", 2, ["training.global_bach", "'global_batch'", "command line"]),
    ("plan recipe=vla70", 2, ["recipe=vla70", "'vla70b'", "llama3_8b"]),
    ("plan recipe=../../x", 2, ["../../x", "name, not a path", "--config-dir"]),
    ("plan recipe=", 2, ["recipe= is missing"]),
    ("plan cluster=64xA100", 2, ["recipe= is missing"]),
    (f"{VLA} recipe=vla_tiny", 2, ["given 2 times"]),
    ("preflight recipe=vla_tiny cluster=local launcher.python=/no/python", 2, ["launcher.python: /no/python"]),
    ("plan recipe=vla_tiny cluster=4x2xA100 strategy=hetero model=llama3_8b", 2, ["hetero.yaml:", "no component"]),
    ("export vla_tiny -o out", 2, ["vla_tiny: no run", "run.root=DIR"]),
    ("plan recipe=vla70b cluster=64xA10x", 2, ["cluster=64xA10x", "A100-80GB", "64xTYPE"]),
    ("plan recipe=vla70b cluster=12xA100", 2, ["12 = 1 x 8 + 4", "NODESxGPUSxTYPE"]),
    ("plan recipe=vla70b cluster=0xA100", 2, ["cluster.gpus", "greater than or equal to 1"]),
    ("plan recipe=vla70b cluster=A100", 2, ["how many GPUs", "cluster=64xA100"]),
    ("plan recipe=vla70b cluster=64xa100", 2, ["cluster=64xa100", "Did you mean '64xA100'?"]),
    ("plan recipe=vla70b cluster=8X8xh100", 2, ["Did you mean '8x8xH100'?"]),
    (f"{VLA} training.lr=1e-4", 2, ["training.lr: unknown key. Did you mean 'training.optimizer.lr'"]),
    (f"{VLA} tp=8", 2, ["tp: unknown key. Did you mean 'strategy.COMPONENT.tp' or 'strategy.every.tp'?"]),
    (f"{VLA} strategy.tp=8", 2, ["strategy.tp: is 8", "'strategy.every.tp'"]),
    (f"{VLA} strateg=zero3", 2, ["strateg", "'strategy'"]),
    (f"{VLA} strategy=zero4", 2, ["strategy=zero4", "'zero3'"]),
    (f"{VLA} strategy.lm.tp=8", 2, ["command line", "strategy.lm", "'llm'"]),
    (f"{VLA} strategy.llm.tpp=8", 2, ["strategy.llm.tpp", "'tp'", "recompute"]),
    (f"{VLA} strategy.llm=8", 2, ["strategy.llm", "takes keys"]),
    (f"{VLA} strategy.zenflow.topk_ratio=0.2", 2, ["strategy.zenflow: topk_ratio set, but enabled is false"]),
    (f"{VLA} engine.monitor.wandb.project=x", 2, ["engine.monitor.wandb: project set, but enabled is false"]),
    (f"{VLA} engine=native strategy=auto strategy.every.ep=3", 3, ["no experts to share out", "ep can be 1"]),
    (f"{VLA} strategy.nvme.path=/nvme", 3, ["strategy.nvme is set, but no component's offload is nvme"]),
    (f"{VLA} training=lora", 2, ["no such training", "recipe=llama3_8b_lora"]),
    (f"{VLA} layouts.32.llm.tp=4", 2, ["layouts.32: the cluster has 64 GPUs", "layouts.64.COMPONENT.KEY"]),
    (f"{VLA} strategy=zero1 layouts.64.llm.tp=4", 2, ["layouts.64: strategy is zero1", "strategy.COMPONENT.KEY"]),
    (f"{VLA} training.precision=bf32", 2, ["bf16, fp16, fp32"]),
    (f"{VLA} training.steps=many", 2, ["training.steps", "integer", "'many'"]),
    (f"{VLA} training.steps=", 2, ["training.steps", "missing"]),
    (f"{VLA} training.steps", 2, ["'training.steps' is not KEY=VALUE"]),
    (f"{VLA} training.optimizer.lr=[1", 2, ["training.optimizer.lr=[1", "can't be read"]),
    (f"{VLA} model.edges=[]", 2, ["no edge joins"]),
    (f"{VLA} model.components.lmm.train=nothing", 2, ["has no component 'lmm'", "projector", "mean 'llm'?"]),
    (f"{VLA} env.A.B=1", 2, ["env.A: holds keys, where text belongs"]),
    ("plan recipe=vla_tiny cluster=local training.precision=fp16", 3, ["nearest: training.precision=bf16"]),
    ("plan recipe=llama3_8b cluster=8xV100 training.precision=bf16", 3, ["nearest: training.precision=fp16"]),
    (f"{VLA} env.HF_TOKEN=abc", 2, ["env.HF_TOKEN", "launcher.pass_env=[HF_TOKEN]"]),
    (f"{VLA} env.A=${{HOME}}", 2, ["env.A", "'${'"]),
    (f"{VLA} --jsn", 2, ["--jsn", "--json"]),
    (f"{VLA} --accept memroy.gpu", 2, ["memroy.gpu", "memory.gpu"]),
    (f"{VLA} --config-dir /nowhere/at/all", 2, ["/nowhere/at/all", "no such folder"]),
    (f"{VLA} strategy.name=zero3", 2, ["strategy=zero3"]),
    (f"{VLA} strategy.components=null", 2, ["strategy"]),
    (f"{VLA} training.optimizer.lr=1e400", 2, ["training.optimizer.lr", "finite"]),
    (f"{VLA} watchdog.min_speed=1.5", 2, ["watchdog.min_speed", "less than 1", "1.5"]),
    (f"{VLA} script=x.py watchdog.min_speed=0.5", 3, ["dslaunch.runtime", "x.py", "notify.breach.step_time=stop"]),
    (f"{VLA} training.optimizer.betas=[nan,nan]", 2, ["training.optimizer.betas", "finite"]),
    (f"{VLA} training.optimizer.min_lr=1", 2, ["min_lr 1 is above lr"]),
    (f"{VLA} training.optimizer.schedule=wsd", 2, ["training.optimizer", "needs decay_steps"]),
    (f"{VLA} training.optimizer.decay_steps=9", 2, ["of schedule wsd, but schedule is cosine"]),
    (f"{VLA} training.seed=99999999999999999999", 2, ["training.seed", "less than"]),
    (f"{VLA} cluster.network.latency_us=1e308", 2, ["latency_us", "less than"]),
    (f"{VLA} hydra.run.dir=/tmp/x", 2, ["hydra.run.dir: unknown key"]),
    (f"{VLA} training.precision=bf16,fp16", 2, ["several values"]),
    (f"{VLA} env.1FOO=x", 2, ["env.1FOO=x: can't be read"]),
    (f"{VLA} name=a/b", 2, ["name", "letters, digits"]),
    (f"{VLA} launcher.pass_env=HOME", 2, ["it takes a list, such as pass_env=[A,B]"]),
    (f"{VLA} script=\udcff.py", 2, ["is not UTF-8"]),
    ("plan recipe=vla70b cluster=\u0666\u0664xA100", 2, ["no such cluster"]),
    ("plan recipe=llama3_8b engine.extra.foo=1", 2, ["engine.extra.foo", "silently ignore"]),
    ("launch out --dry-run -- a b", 2, ["launched as it is"]),
    ("recipe=vla_tiny cluster=local script=x.py", 2, ["both given", "module= or script= on the command line"]),
    ("check recipe=vla70b somefile", 2, ["found both"]),
    ("check recipe=vla70b --fail-on nope", 2, ["--fail-on 'nope'"]),
    (f"{VLA} stray", 2, ["'stray' is not KEY=VALUE"]),
    ("pln recipe=vla70b", 2, ["'pln'", "'plan'"]),
    ("vla70b", 2, ["'vla70b'", "recipe=vla70b"]),
    (f"{VLA} strategy.llm.tp=16", 3, ["strategy.llm.tp is 16", "8 GPUs", "at most 8"]),
    (f"{VLA} strategy.llm.tp=7", 3, ["heads 64 / tp 7 = 9.143", "tp can be 1, 2, 4, 8"]),
    (f"{VLA} strategy.llm.pp=3", 3, ["layers 80 / pp 3"]),
    (f"{VLA} strategy.llm.dp=4", 3, ["tp 8 x pp 4 x dp 4 = 128 ranks", "64 GPUs"]),
    (f"{VLA} strategy.llm.dp=1", 3, ["leave 32 of 64 GPUs without work", "dp=2"]),
    (f"{VLA} strategy.llm.zero=3", 3, ["strategy.llm.zero is 3", "0, 1 where pp is 4", "zero=1"]),
    (f"{VLA} training.global_batch=100", 3, ["100 / (micro_batch 1 x dp 32", "64 or 128"]),
    (
        f"{VLA} training.num_microbatches=16",
        3,
        ["1 x num_microbatches 16 x dp 2", "= 32", "num_microbatches=256"],
    ),
    (f"{VLA} training.seq_len=256", 3, ["256 - 256 leaves no text"]),
    (f"{VLA} training.schedule=interleaved", 3, ["vpp"]),
    (f"{VLA} launcher=local", 3, ["launcher is local", "launcher=slurm"]),
    (f"{VLA} launcher=ssh", 3, ["no host is named", "launcher.hostfile"]),
    (f"{VLA} engine=deepspeed", 3, ["deepspeed takes pp 1", "engine=native"]),
    ("plan recipe=vla70b cluster=6xA100", 3, ["16, 64, 256", "6 GPUs = 1 node x 6", "strategy=auto"]),
    ("plan recipe=llama3_8b cluster=8xV100", 3, ["bf16", "V100", "training.precision=fp16"]),
    ("plan recipe=llama3_8b cluster=8xA100 strategy=layouts", 3, ["pins no layouts", "strategy=zero3"]),
    ("plan recipe=llama3_8b cluster=8xA100 engine.version=0.1", 2, ["engine.version is 0.1", "0.19.8"]),
]


@pytest.mark.parametrize(("words", "status", "holds"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_gets_one_clear_message(
    dslaunch: CommandLine, words: str, status: int, holds: list[str]
) -> None:
    ran = dslaunch(words)
    assert ran.status == status, ran.err
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert all(part in ran.err for part in holds), ran.err


def test_a_tutorials_launch_line_is_refused_for_each_of_its_faults(dslaunch: CommandLine) -> None:
    """64 GPUs in 8 nodes, no hostfile, TP8 PP4 DP2, ZeRO-2, accumulation 16, micro-batch 1, batch 512, fp16."""
    ran = dslaunch(
        "launch recipe=llama3_70b cluster=64xA100 engine=megatron_deepspeed launcher=ssh strategy.llm.tp=8 "
        "strategy.llm.pp=4 strategy.llm.dp=2 strategy.llm.zero=2 training.num_microbatches=16 "
        "training.micro_batch=1 training.global_batch=512 training.precision=fp16"
    )
    assert ran.status == 3
    batch, hosts, stage = ran.err.splitlines()
    assert "micro_batch 1 x num_microbatches 16 x dp 2 (llm) = 32" in batch
    assert "training.num_microbatches=256, or training.global_batch=32, or training.micro_batch=16" in batch
    assert "8 nodes" in hosts
    assert "HOST slots=8" in hosts
    assert "takes 0, 1 where pp is 4" in stage
    assert "strategy.llm.zero=1" in stage


def test_a_yaml_mistake_is_named_with_file_line_and_column(dslaunch: CommandLine, tmp_path: Path) -> None:
    site = make_site(tmp_path / "site", RECIPE + "   bad: [1\n")
    ran = dslaunch("plan", "recipe=mine", "--config-dir", str(site))
    assert ran.status == 2
    assert f"{site}/recipes/mine.yaml:" in ran.err
    assert "not YAML" in ran.err


def test_a_misspelt_key_is_named_with_its_file_and_line(dslaunch: CommandLine, tmp_path: Path) -> None:
    site = make_site(tmp_path / "site", RECIPE.replace("global_batch", "global_bach"))
    ran = dslaunch("plan", "recipe=mine", "--config-dir", str(site))
    assert ran.status == 2
    assert (
        f"{site}/recipes/mine.yaml:9: training.global_bach: unknown key. Did you mean 'global_batch'?"
        in ran.err
    )


def test_a_cluster_files_mistake_is_named_in_that_file(dslaunch: CommandLine, tmp_path: Path) -> None:
    ours = "defaults:\n  - A100-80GB\n  - _self_\nnode:\n  host_memory: 512\n"
    site = make_site(tmp_path / "site", RECIPE, ours=ours)
    ran = dslaunch("plan", "recipe=mine", "cluster=8xours", "--config-dir", str(site))
    assert ran.status == 2
    assert f"{site}/conf/cluster/ours.yaml:5: cluster.node.host_memory: unknown key" in ran.err
    assert "'host_memory_gib'" in ran.err


@pytest.mark.parametrize(("line", "found"), [("time: 12:00:00", "43200"), ("account: 0123", "83")])
def test_a_number_where_text_belongs_says_to_quote_it(
    dslaunch: CommandLine, tmp_path: Path, line: str, found: str
) -> None:
    site = make_site(tmp_path / "site", RECIPE + f"launcher:\n  slurm:\n    {line}\n")
    ran = dslaunch("plan", "recipe=mine", "--config-dir", str(site))
    assert ran.status == 2
    assert f"is {found}, a number to YAML" in ran.err
    assert "quotes" in ran.err


def test_a_model_with_a_circle_is_refused(dslaunch: CommandLine, tmp_path: Path) -> None:
    ends = (("a", "b"), ("b", "a"))
    edges = [f"    - {{from: {source}, to: {to}, tokens: 1, join: add}}\n" for source, to in ends]
    circle = "model:\n  edges:\n" + "".join(edges)
    parts = "  components:\n    a: {arch: mlp, dims: [8, 8]}\n    b: {arch: mlp, dims: [8, 8]}\n"
    site = make_site(tmp_path / "site", RECIPE + circle + parts)
    ran = dslaunch("plan", "recipe=mine", "--config-dir", str(site))
    assert ran.status == 2
    assert "circle" in ran.err or "no edge joins" in ran.err


BROKEN_RECIPES = {
    "defaults lead back": ("defaults: [mine, _self_]\n", "lead back"),
    "no defaults": ("name: mine\n", "defaults: [base, _self_]"),
    "defaults is a word": ("defaults: base\n", "defaults: [base, _self_]"),
    "not UTF-8": (b"\xff\xfe", "not UTF-8"),
    "an unknown group": ("defaults: [base, {override modell: vla70b}, _self_]\n", "Did you mean 'model'?"),
    "an unknown model": ("defaults: [base, {override model: vla70}, _self_]\n", "Did you mean 'vla70b'?"),
    "an unknown cluster": ("defaults: [base, {override cluster: 64xA10x}, _self_]\n", "no such cluster"),
    "another strategy's name": (RECIPE + "strategy: {name: zero1}\n", "override strategy: zero1"),
    "an interpolation to nothing": (RECIPE + "about: ${nothing.here}\n", "nothing.here"),
}


@pytest.mark.parametrize("case", BROKEN_RECIPES)
def test_a_broken_recipe_is_answered_with_its_file(dslaunch: CommandLine, tmp_path: Path, case: str) -> None:
    text, says = BROKEN_RECIPES[case]
    site = make_site(tmp_path / "site", RECIPE)
    recipe = site / "recipes" / "mine.yaml"
    recipe.write_bytes(text if isinstance(text, bytes) else text.encode())
    ran = dslaunch("plan", "recipe=mine", "--config-dir", str(site))
    assert ran.status == 2, ran.err
    assert says in ran.err
    assert "mine" in ran.err or "strategy" in ran.err
    listed = dslaunch("recipes", "--config-dir", str(site))
    assert listed.status == 0
    assert "vla70b" in listed.out


def test_a_layout_for_one_size_can_be_typed(dslaunch: CommandLine) -> None:
    plan = dslaunch("plan recipe=vla70b cluster=64xA100 layouts.64.llm.tp=4 --json").json
    llm = plan["components"]["llm"]
    assert (llm["tp"], llm["pp"], llm["dp"]) == (4, 4, 4)


def test_render_says_what_it_found(dslaunch: CommandLine, tmp_path: Path) -> None:
    ran = dslaunch("render", "recipe=llama3_8b", "cluster=8xH100", "-o", str(tmp_path / "out"))
    assert ran.status == 0
    assert "program.missing" in ran.err


def test_nothing_is_written_where_the_plan_does_not_fit(dslaunch: CommandLine, tmp_path: Path) -> None:
    ran = dslaunch("render", "recipe=vla70b", "cluster=16xA100", "-o", str(tmp_path / "out"))
    assert ran.status == 3
    assert "memory.gpu" in ran.err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_is_not_rendered_into(dslaunch: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    ran = dslaunch("render", "recipe=vla_tiny", "cluster=local", "-o", str(tmp_path))
    assert ran.status == 2
    assert "did not render" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
