"""`dslaunch check FILE...`: topology, selection, waivers, a site's settings, formats and --fix."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from tests.command import CommandLine

CONFIG = """\
{
  // a comment that stays
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 2,
  "zero_optimization": {"stage": 2}
}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("ds_config.json")
    path.write_text(CONFIG, encoding="utf-8")
    return path


def put(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


LAUNCHES = [
    ("run.sh", "deepspeed --num_gpus 4 train.py\n", "ranks: 4 = 1 node x 4, from run.sh:1"),
    ("run.sh", "torchrun --nnodes 2 --nproc-per-node 8 t.py\n", "ranks: 16 = 2 nodes x 8, from run.sh:1"),
    ("run.sh", "N=2\ntorchrun --nnodes=$N --nproc_per_node 8 t.py\n", "ranks: 16 = 2 nodes x 8, from run.sh:2"),
    ("run.sh", "python train.py\n", "ranks: 1 = 1 node x 1, from run.sh:1"),
    ("run.sh", "torchrun --nnodes ${N:-2} --nproc-per-node 8 t.py\n", "ranks: 16 = 2 nodes x 8, from run.sh:1"),
    ("run.sh", "torchrun --nnodes ${SLURM_NNODES:-1} --nproc-per-node 8 t.py\n", "ranks: not known, run.sh:1"),
    ("run.sh", "accelerate launch --num_processes 6 t.py\n", "ranks: 6 = 1 node x 6, from run.sh:1"),
    ("run.sh", "mpirun -np 12 python t.py\n", "ranks: 12, from run.sh:1"),
    (
        "job.sbatch", "#!/bin/sh\n#SBATCH -N 2\n#SBATCH --ntasks-per-node=8\nsrun python t.py\n",
        "ranks: 16 = 2 nodes x 8, from job.sbatch:4",
    ),
    (
        "job.sbatch",
        "#!/bin/sh\n#SBATCH --nodes=2 --gres=gpu:a100:4\nsrun torchrun --nnodes $SLURM_NNODES --nproc-per-node"
        " $SLURM_GPUS_ON_NODE t.py\n",
        "ranks: 8 = 2 nodes x 4, from job.sbatch:3",
    ),
    ("hostfile", "a slots=8\nb slots=8\n", "ranks: 16 = 2 nodes x 8, from hostfile"),
    (
        "a.yaml", "distributed_type: DEEPSPEED\nnum_processes: 32\nnum_machines: 4\n",
        "ranks: 32 = 4 nodes x 8, from a.yaml",
    ),
    (
        "run.sh", "torchrun --nproc-per-node $GPUS t.py\n",
        "ranks: not known, run.sh:1 leaves them open; --world-size N or cluster=NAME tells",
    ),
    (
        "run.sh", "torchrun --nproc-per-node 2 t.py\ntorchrun --nproc-per-node 4 t.py\n",
        "ranks: not known, run.sh:1 leaves them open; --world-size N or cluster=NAME tells",
    ),
    ("run.sh", "deepspeed --include a:0,1 t.py\n", "ranks: not known, run.sh:1 leaves them open"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "said"), LAUNCHES)
def test_the_files_say_how_many_ranks_there_are(
    dslaunch: CommandLine, config: Path, name: str, text: str, said: str
) -> None:
    ran = dslaunch("check", str(config), put(name, text), "--select", "batch")
    assert ran.out.splitlines()[-1].startswith(said), ran.out


def test_a_hostfile_counts_where_the_launcher_reads_it(dslaunch: CommandLine, config: Path) -> None:
    hosts = put("hostfile", "a slots=8\nb slots=8\nc slots=8\n")
    command = put("run.sh", "deepspeed --hostfile hostfile --num_nodes 2 train.py\n")
    ran = dslaunch("check", str(config), hosts, command, "--select", "batch")
    assert "ranks: 16 = 2 nodes x 8, from run.sh:1" in ran.out
    command = put("run.sh", "deepspeed --hostfile hostfile train.py\n")
    assert "ranks: 24 = 3 nodes x 8" in dslaunch("check", str(config), hosts, command).out


def test_options_go_before_what_files_say(dslaunch: CommandLine, config: Path) -> None:
    command = put("run.sh", "torchrun --nproc-per-node 7 t.py\n")
    assert dslaunch("check", str(config), command, "--select", "batch").status == 6
    ran = dslaunch("check", str(config), command, "--select", "batch", "--nodes", "2", "--ranks-per-node", "8")
    assert ran.status == 0
    assert "ranks: 16 = 2 nodes x 8, as given" in ran.out


def test_a_cluster_beside_files(dslaunch: CommandLine, config: Path) -> None:
    assert "ranks: 16 = 2 nodes x 8, as given" in dslaunch(f"check {config} cluster=16xA100").out
    for words, message in (
        ("cluster=16xA100 --world-size 4", "leave out --world-size"),
        ("cluster=16xA10x", "no such cluster"),
        ("training.seq_len=8", "cluster=NAME alone"),
    ):
        ran = dslaunch(f"check {config} {words}")
        assert (ran.status, message in ran.err) == (2, True), ran.err


def test_a_components_file_without_its_plan_is_not_judged_by_all_ranks(
    dslaunch: CommandLine, config: Path
) -> None:
    text = CONFIG.replace('"train_micro', '"gradient_accumulation_steps": 8, "train_micro')
    name = put("ds_config.llm.json", text)
    assert dslaunch("check", name, "--world-size", "64").status == 0
    assert dslaunch("check", put("other.json", text), "--world-size", "64").status == 6


def test_trainer_arguments_beside_it_tell_who_reads_auto(dslaunch: CommandLine, config: Path) -> None:
    config.write_text('{"train_micro_batch_size_per_gpu": "auto"}', encoding="utf-8")
    assert "json.auto" in dslaunch(f"check {config} --fail-on info").out
    arguments = put("args.yaml", "output_dir: o\nper_device_train_batch_size: 2\n")
    assert "json.auto" not in dslaunch(f"check {config} {arguments}").out


BROKEN = CONFIG.replace('"stage": 2', '"stage": 7, "sate": 1')


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("", {"key.range", "key.unknown", "check.world-size"}),
        ("--select key", {"key.range", "key.unknown"}),
        ("--select key.range,batch", {"key.range"}),
        ("--select key --ignore key.unknown", {"key.range"}),
        ("--ignore key.* --ignore check", set()),
        ("--accept key.range --accept key.unknown:2999-12-31", {"check.world-size"}),
    ],
)
def test_which_rules_speak(dslaunch: CommandLine, config: Path, options: str, found: set[str]) -> None:
    config.write_text(BROKEN, encoding="utf-8")
    ran = dslaunch(f"check {config} --json {options}")
    assert {row["rule"] for row in ran.json["findings"]} == found
    assert ran.status == (6 if found & {"key.range", "key.unknown"} else 0)


def test_waived_findings_are_counted(dslaunch: CommandLine, config: Path) -> None:
    config.write_text(BROKEN, encoding="utf-8")
    ran = dslaunch(f"check {config} --accept key.range")
    assert "; 1 waived (key.range)" in ran.out
    waived = dslaunch(f"check {config} --accept key.range --json").json["waived"]
    assert [row["rule"] for row in waived] == ["key.range"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--select bach", "Did you mean 'batch'?"),
        ("--ignore key.rang", "Did you mean 'key.range'?"),
        ("--accept key.range:2020-02-02", "that day is past"),
        ("--accept key.range:soon", "'soon' is no day"),
        ("--accept key.rang:2999-01-01", "Did you mean 'key.range'?"),
        ("--format sarf", "Did you mean 'sarif'?"),
        ("--megatron-version core", "numbers and dots, as in 0.16.1"),
        ("--config-dir nowhere", "no such folder"),
    ],
)
def test_mistakes_in_options(dslaunch: CommandLine, config: Path, options: str, message: str) -> None:
    ran = dslaunch(f"check {config} {options}")
    assert (ran.status, message in ran.err) == (2, True), ran.err


def site(text: str) -> str:
    Path("site").mkdir(exist_ok=True)
    Path("site/dslaunch.yaml").write_text(text, encoding="utf-8")
    return "site"


def test_a_site_turns_rules_off_raises_them_and_pins_versions(dslaunch: CommandLine, config: Path) -> None:
    config.write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": true}', encoding="utf-8")
    assert dslaunch(f"check {config}").status == 0
    raised = site("rules:\n  severity: {key.deprecated: error}\n")
    assert dslaunch(f"check {config} --config-dir {raised}").status == 6
    assert dslaunch(f"check {config} --config-dir {site('rules: {ignore: [key]}')} --json").json["findings"] == []
    waived = site("rules: {accept: ['key.deprecated:2999-01-01']}")
    assert dslaunch(f"check {config} --config-dir {waived} --json").json["waived"]
    config.write_text('{"train_micro_batch_size_per_gpu": 1}', encoding="utf-8")
    pinned = site("versions: {deepspeed: '0.9.5'}")
    assert "DeepSpeed 0.9.5 is outside the key table" in dslaunch(f"check {config} --config-dir {pinned}").out


def test_a_series_is_its_newest_version(dslaunch: CommandLine, config: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "zenflow": {}}}'
    config.write_text(text, encoding="utf-8")
    assert "key.too-new" in dslaunch(f"check {config} --deepspeed-version 0.16").out
    assert "key.too-new" not in dslaunch(f"check {config} --deepspeed-version 0.17").out


@pytest.mark.parametrize(
    ("words", "version"),
    [
        ("recipe=llama3_8b cluster=8xA100 engine=deepspeed", "0.18.4"),
        ("recipe=llama3_8b cluster=8xA100", "0.18.4"),
        ("recipe=llama3_8b cluster=8xA100 engine=deepspeed engine.version=0.19.8", "0.19.8"),
        ("recipe=llama3_70b cluster=64xA100 engine=megatron engine.path=/opt/Megatron-LM", "0.16.1"),
        ("recipe=llama3_8b cluster=64xH100 strategy=hsdp script=train.py", "2.13"),
    ],
)
def test_a_sites_versions_are_those_that_plans_are_made_for(
    dslaunch: CommandLine, config: Path, words: str, version: str
) -> None:
    pinned = site("versions: {deepspeed: '0.18.4', megatron: '0.16.1'}")
    ran = dslaunch(f"plan {words} --config-dir {pinned} --json")
    assert ran.json["engine"]["version"] == version, ran.err


def test_a_sites_version_that_nothing_is_rendered_for_is_refused(dslaunch: CommandLine, config: Path) -> None:
    ran = dslaunch(f"plan recipe=llama3_8b --config-dir {site('versions: {deepspeed: 0.9.5}')}")
    assert (ran.status, "engine.version is 0.9.5" in ran.err) == (2, True), ran.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: {ignor: []}", "site/dslaunch.yaml:1:9: unknown key 'ignor'. Did you mean 'ignore'?"),
        ("rules:\n  ignore: [key.rang]\n", "Did you mean 'key.range'?"),
        ("rules:\n  ignore: key\n", "site/dslaunch.yaml:2:3: rules.ignore is 'key'; expected a list"),
        ("rules: {severity: {key.range: info}}", "expected error; to waive the rule, name it in rules.accept"),
        ("rules: {severity: {key.range: bad}}", "expected one of"),
        ("versions: {deepspeed: 0.9}", "a version in quotes"),
        ("rules: {accept: ['key.range:x']}", "'x' is no day"),
        ("a: [", "no YAML"),
        ("- a", "keys rules, versions"),
    ],
)
def test_mistakes_in_a_sites_settings(dslaunch: CommandLine, config: Path, text: str, message: str) -> None:
    ran = dslaunch(f"check {config} --config-dir {site(text)}")
    assert (ran.status, message in ran.err) == (2, True), ran.err


def test_an_expired_waiver_of_a_site_no_longer_counts(dslaunch: CommandLine, config: Path) -> None:
    config.write_text(BROKEN, encoding="utf-8")
    late = site("rules: {accept: ['key.range:2020-01-01', 'key.unknown:2999-01-01']}")
    ran = dslaunch(f"check {config} --config-dir {late} --json")
    assert "key.range" in {row["rule"] for row in ran.json["findings"]}
    assert [row["rule"] for row in ran.json["waived"]] == ["key.unknown"]
    assert ran.err == "site: the waiver key.range:2020-01-01 has expired.\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("ds_config.json --world-size 8 --nodes 2 --ranks-per-node 8", "--nodes 2 * --ranks-per-node 8 make 16"),
        ("ds_config.json --world-size 2 --nodes 3", "--world-size 2 leaves nodes without a rank"),
        ("ds_config.json --world-size 8 --tp 3", "no multiple of --tp 3 * --pp 1 = 3. Give sizes"),
        ("ds_config.json --nodes 2 --ranks-per-node 4 --tp 3", "the 8 ranks, as given: no multiple of --tp 3"),
        ("ds_config.json hostfile --pp 3", "the 8 ranks, from hostfile: no multiple of --tp 1 * --pp 3 = 3."),
        ("ds_config.json --world-size 8 --ranks-per-node 16", "--world-size 8 is no multiple of it"),
        ("recipe=vla_tiny cluster=local --tp 2", "--tp: belongs to files written elsewhere"),
        ("recipe=vla_tiny cluster=local --megatron-version 0.12", "--megatron-version: belongs to files"),
        ("ds_config.json --accept batch", "--accept: No rule is called 'batch'. batch has batch.derived"),
        ("", "name the files, or a recipe"),
    ],
)
def test_options_that_contradict_each_other(
    dslaunch: CommandLine, config: Path, options: str, said: str
) -> None:
    put("hostfile", "a slots=8\n")
    ran = dslaunch("check", *options.split())
    assert (ran.status, said in ran.err) == (2, True), ran.err


def test_auto_in_a_file_that_the_script_hands_to_deepspeed_itself_is_an_error(
    dslaunch: CommandLine, config: Path
) -> None:
    config.write_text('{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": "auto"}')
    put("train.py", "import deepspeed\nengine, *_ = deepspeed.initialize(model=m, config='ds_config.json')\n")
    alone = dslaunch("check", "ds_config.json", "--json").json["findings"]
    beside = dslaunch("check", "ds_config.json", "train.py", "--json").json["findings"]
    assert [(row["rule"], row["severity"]) for row in alone] == [("json.auto", "info")]
    assert [(row["rule"], row["severity"]) for row in beside] == [("json.auto", "error")]


MEGATRON = """\
torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 256 --num-attention-heads 8 \
  --seq-length 1024 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --lr 1e-4 --bf16 \
  --tokenizer-type NullTokenizer --vocab-size 32000 {more}
"""


@pytest.mark.parametrize(
    ("more", "version", "severity"),
    [
        ("--overlap-grad-reduce --overlap-param-gather", "", "error"),
        ("--multi-latent-attention --group-query-attention --num-query-groups 2", "", "info"),
        ("--multi-latent-attention --group-query-attention --num-query-groups 2", "0.16", "error"),
        ("--multi-latent-attention --group-query-attention --num-query-groups 2", "0.15", ""),
        ("--deterministic-mode --use-flash-attn", "", ""),
        ("--overlap-grad-reduce --overlap-param-gather --a-forks-own-flag", "", ""),
    ],
)
def test_what_each_megatron_refuses_is_an_error_and_what_the_newest_refuses_is_said(
    dslaunch: CommandLine, config: Path, more: str, version: str, severity: str
) -> None:
    put("run.sh", MEGATRON.format(more=more))
    chosen = ["--megatron-version", version] if version else []
    ran = dslaunch("check", "run.sh", "--json", "--ignore", "megatron.unknown-flag", *chosen)
    found = [finding["severity"] for finding in json.loads(ran.out)["findings"]]
    assert found == ([severity] if severity else [])
    text = dslaunch("check", "run.sh", *chosen).out
    assert ("megatron-core: version not known" in text) == (not version)


def test_a_comment_waives_on_its_line_and_on_the_command_below(dslaunch: CommandLine, config: Path) -> None:
    lines = BROKEN.splitlines()
    lines[4] += " // dslaunch: ignore[key.range, key.unknown]"
    config.write_text("\n".join(lines), encoding="utf-8")
    assert dslaunch(f"check {config} --select key").status == 0
    token = "hf_" + "a1B2" * 9
    command = "python t.py --token"
    script = f"#!/bin/sh\n# dslaunch: ignore[env.secret]\n{command} \\\n  {token}\n{command} {token}\n"
    ran = dslaunch("check", put("run.sh", script), "--select", "env.secret", "--json")
    assert [row["where"] for row in ran.json["findings"]] == ["run.sh:5:21"]


def test_a_waiver_of_the_plan_is_recorded_with_its_expiry(dslaunch: CommandLine, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = "recipe=vla70b cluster=16xA100 --accept memory.gpu:2999-12-31"
    assert dslaunch(f"render {words} -o {out}").status == 0
    assert json.loads((out / "plan.json").read_text())["accepted"] == ["memory.gpu:2999-12-31"]
    assert "1 waived (memory.gpu)" in dslaunch(f"check {out}").out


def test_github_annotations(dslaunch: CommandLine, config: Path) -> None:
    config.write_text(BROKEN, encoding="utf-8")
    ran = dslaunch(f"check {config} --format github --select key.range")
    start = "::error file=ds_config.json,line=5,col=25,title=key.range::'zero_optimization.stage' is 7;"
    assert ran.out.startswith(start)
    assert ran.out.count("\n") == 1


def test_fix_shows_a_diff_and_writes_where_it_is_told_to(dslaunch: CommandLine, config: Path) -> None:
    old = CONFIG.replace('"stage": 2', '"stage": 3, "stage3_gather_fp16_weights_on_model_save": true')
    config.write_text(old, encoding="utf-8")
    config.chmod(0o640)
    shown = dslaunch(f"check {config} --fix --select key")
    new = old.replace("gather_fp16", "gather_16bit")
    assert "-  \"zero_optimization\"" in shown.err
    assert "nothing was written; --yes writes it" in shown.err
    assert config.read_text(encoding="utf-8") == old
    assert dslaunch(f"check {config} --fix --yes --select key").status == 0
    assert config.read_text(encoding="utf-8") == new
    assert stat.S_IMODE(config.stat().st_mode) == 0o640
    assert "nothing has one right fix" in dslaunch(f"check {config} --fix --yes --select key").err
    assert list(Path().iterdir()) == [config]


def test_fix_leaves_what_is_waived(dslaunch: CommandLine, config: Path) -> None:
    old = CONFIG.replace('"stage": 2', '"stage": 3, "stage3_gather_fp16_weights_on_model_save": true')
    config.write_text(old, encoding="utf-8")
    dslaunch(f"check {config} --fix --yes --accept key.deprecated --accept key.alias --accept key.removed")
    assert config.read_text(encoding="utf-8") == old


def test_fix_is_for_files(dslaunch: CommandLine) -> None:
    ran = dslaunch("check recipe=llama3_8b --fix")
    assert (ran.status, "--fix mends files" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("written", "mended"),
    [
        ("overlap_com", "overlap_comm"), ("overlap_commm", "overlap_comm"), ("ovrelap_comm", "overlap_comm"),
        ("overlap-comm", "overlap_comm"), ("stage3_max_liv_paramters", ""), ("rattio", ""),
    ],
)  # fmt: skip
def test_fix_respells_a_slip_of_one_letter(
    dslaunch: CommandLine, tmp_path: Path, written: str, mended: str
) -> None:
    path = tmp_path / "ds_config.json"
    text = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "KEY": true}}'
    path.write_text(text.replace("KEY", written), encoding="utf-8")
    dslaunch(f"check {path} --fix --yes --select key.unknown")
    assert path.read_text(encoding="utf-8") == text.replace("KEY", mended or written)


def test_fix_leaves_a_slip_beside_the_right_key(dslaunch: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 8, "train_batch_sizee": 16}', encoding="utf-8")
    assert "nothing has one right fix" in dslaunch(f"check {path} --fix --yes --select key.unknown").err


@pytest.mark.parametrize("verb", ["plan", "check", "render -o out"])
@pytest.mark.parametrize("engine", ["deepspeed", "megatron", "torch", "auto"])
def test_an_unknown_version_of_the_engine_is_a_mistake(dslaunch: CommandLine, verb: str, engine: str) -> None:
    ran = dslaunch(f"{verb} recipe=llama3_8b cluster=8xA100 engine={engine} engine.version=0.3.0")
    assert ran.status == 2
    assert "engine.version is 0.3.0; " in ran.err
    assert " is rendered for " in ran.err


def test_a_rank_filled_in_too_early_is_no_hang_where_the_rendezvous_numbers_the_nodes(
    dslaunch: CommandLine, config: Path
) -> None:
    line = "srun torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint $M:1 --node-rank $SLURM_NODEID t.py"
    put("job.sbatch", f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\n{line}\n")
    ran = dslaunch("check job.sbatch --select slurm.early-expansion")
    assert (ran.status, "info: $SLURM_NODEID is filled in" in ran.out) == (0, True), ran.out
