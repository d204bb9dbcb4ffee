"""`dslaunch diff`: what a change does, how grave it is, and what a reviewer should ask."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dslaunch.files.rendered import is_rendered
from tests.command import RECIPE, CommandLine, make_site

ONE = "recipe=llama3_8b cluster=8xH100 script=train.py"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")


def _git(*words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *words], check=True, capture_output=True)


def test_the_same_recipe_differs_in_nothing(dslaunch: CommandLine) -> None:
    found = dslaunch("diff", ONE, ONE, "--json").json
    assert found["schema"] == "dslaunch.diff/1"
    assert (found["kinds"], found["keys"], found["files"], found["questions"]) == ([], [], [], [])
    assert "Nothing differs" in dslaunch("diff", ONE, ONE).out


def test_a_larger_batch_is_convergence_and_asks_about_the_learning_rate(dslaunch: CommandLine) -> None:
    ran = dslaunch("diff", ONE, f"{ONE} training.global_batch=256", "--json", "--fail-on", "convergence")
    assert ran.status == 6
    found = ran.json
    assert found["kinds"][0] == "convergence"
    change = next(row for row in found["keys"] if row["key"] == "training.global_batch")
    assert (change["before"], change["after"], change["kind"]) == (128, 256, "convergence")
    assert any("0.0006" in question and "0.000424" in question for question in found["questions"])


def test_what_else_changes_the_result_is_asked_about_once(dslaunch: CommandLine) -> None:
    words = f"{ONE} training.optimizer.lr=1e-4 training.clip=0.5"
    asked = dslaunch("diff", ONE, words, "--json").json["questions"]
    assert asked == [
        "The result changes with training.clip: 1.0 -> 0.5; training.lr: 0.0003 -> 0.0001: which earlier run is "
        "it compared with?"
    ]


def test_a_micro_batch_is_performance_with_memory_and_file_beside_it(dslaunch: CommandLine) -> None:
    ran = dslaunch(
        "diff", ONE, f"{ONE} training.micro_batch=2", "--json", "--fail-on", "convergence,resources"
    )
    assert ran.status == 0
    found = ran.json
    assert found["kinds"] == ["performance"]
    figures = {row["name"]: row for row in found["figures"] if row["unit"] != "USD"}
    memory = figures["memory of llm"]
    assert memory["after"] > memory["before"] > 0
    assert memory["of"] == 79.65
    (file,) = [row for row in found["files"] if row["name"] == "ds_config.json"]
    assert '+  "train_micro_batch_size_per_gpu": 2,' in file["diff"]
    assert file["kind"] == "performance"


def test_more_nodes_are_resources_and_a_misfit_is_a_new_finding(dslaunch: CommandLine) -> None:
    ran = dslaunch("diff", ONE, f"{ONE} strategy=ddp", "--fail-on", "error")
    assert ran.status == 6
    assert "New finding: error [memory.gpu]" in ran.out
    assert "DP8 ZeRO-3" in ran.out
    found = dslaunch("diff", ONE, ONE.replace("8xH100", "2x8xH100"), "--json").json
    assert "resources" in found["kinds"]
    assert {row["name"]: row["after"] for row in found["figures"]}["nodes"] == 2


def test_folders_compare_with_recipes_and_a_name_is_cosmetic(dslaunch: CommandLine) -> None:
    dslaunch("render", *ONE.split(), "-o", "there")
    assert "Nothing differs" in dslaunch("diff", "there", ONE).out
    found = dslaunch("diff", "there", f"{ONE} name=other", "--json").json
    assert found["kinds"] == ["cosmetic"]
    assert {row["kind"] for row in found["files"]} == {"cosmetic"}


@pytest.mark.parametrize(
    ("override", "name", "kind"),
    [
        ("env.NCCL_DEBUG=INFO", "env.sh", "reliability"),
        ("launcher.slurm.partition=big", "job.sbatch", "resources"),
    ],
)
def test_what_only_a_script_holds_is_classed_too(
    override: str, name: str, kind: str, dslaunch: CommandLine
) -> None:
    found = dslaunch("diff", ONE, f"{ONE} {override}", "--json").json
    assert {row["name"]: row["kind"] for row in found["files"]}[name] == kind
    assert kind in found["kinds"]


def test_a_configuration_edited_by_hand_is_convergence_and_asked_about(
    dslaunch: CommandLine, tmp_path: Path
) -> None:
    dslaunch("render", *ONE.split(), "-o", "there")
    shutil.copytree("there", "edited")
    config = tmp_path / "edited" / "ds_config.json"
    config.write_text(config.read_text().replace('"gradient_clipping": 1.0', '"gradient_clipping": 5.0'))
    found = dslaunch("diff", "there", "edited", "--json").json
    assert found["kinds"] == ["convergence"]
    assert found["questions"] == [
        "The plan is the same, but ds_config.json is not: which setting or template does that?"
    ]


def test_a_revision_is_the_other_side_as_it_was(dslaunch: CommandLine, tmp_path: Path) -> None:
    site = make_site(tmp_path / "site", RECIPE)
    dslaunch("render", "recipe=mine", "--config-dir", "site", "-o", "rendered")
    _git("init", "-q")
    _git("add", ".")
    _git("commit", "-q", "-m", "one")
    (site / "recipes" / "mine.yaml").write_text(RECIPE.replace("global_batch: 64", "global_batch: 128"))
    found = dslaunch("diff", "git:HEAD", "recipe=mine", "--config-dir", "site", "--json").json
    changed = {row["key"]: (row["before"], row["after"]) for row in found["keys"]}
    assert changed["training.global_batch"] == (64, 128)
    dslaunch("render", "recipe=mine", "--config-dir", "site", "-o", "rendered")
    folders = dslaunch("diff", "git:HEAD:rendered", "rendered", "--json").json
    assert folders["keys"] == found["keys"]
    assert dslaunch("diff", "git:HEAD", "rendered", "--json").json["keys"] == found["keys"]
    assert not (site / "conf" / "tmp").exists()
    status = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    assert all(line.startswith(" M") for line in status.stdout.splitlines())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a"], "diff takes two sides, found 1"),
        (["recipe=llama3_8b", "cluster=8xH100", "nowhere"], "found 3"),
        (["nowhere", "nowhere"], "nowhere: no such folder"),
        (["cluster=8xH100", ONE], "names no recipe"),
        (["git:", ONE], "say git:REV or git:REV:FOLDER"),
        (["git:HEAD", "git:HEAD~1"], "but not of what"),
        (["git:nosuch", "there"], "git:nosuch"),
        ([ONE, f"{ONE} training.micro_batsh=2"], "Did you mean"),
        ([ONE, ONE, "--fail-on", "speed"], "Allowed: convergence"),
        ([ONE, ONE, "--format", "htm"], "Did you mean 'html'?"),
    ],
)
def test_mistakes_are_answered(words: list[str], said: str, dslaunch: CommandLine) -> None:
    ran = dslaunch("diff", *words)
    assert ran.status == 2
    assert said in ran.err


def test_a_side_that_no_plan_fits_says_which_one(dslaunch: CommandLine) -> None:
    ran = dslaunch("diff", ONE, f"{ONE} strategy.llm.tp=3")
    assert ran.status == 3
    assert ran.err.startswith(f"dslaunch: {ONE} strategy.llm.tp=3: ")


def test_markdown_is_one_comment_with_its_tables_whole(dslaunch: CommandLine) -> None:
    changed = f"{ONE} 'name=a' training.micro_batch=2 env.NOTE='`x`|y'"
    text = dslaunch("diff", ONE, changed, "--format", "markdown").out
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert any("training" in row or "micro_batch" in row for row in rows)
    widths = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
    assert set(widths) <= {4, 5}
    assert text.count("<details>") == text.count("</details>") >= 2


def test_html_shows_what_was_typed_and_fetches_nothing(dslaunch: CommandLine) -> None:
    text = dslaunch("diff", ONE, f"{ONE} env.NOTE='<b>&'", "--format", "html").out
    assert "&lt;b&gt;&amp;" in text
    assert "<b>" not in text
    assert not re.search(r"""(src|href)=["']?(https?:|//)""", text)


def test_a_terminal_gets_colour_and_no_color_takes_it_away(
    dslaunch: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    words = ["diff", ONE, f"{ONE} training.micro_batch=2"]
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32m+" in dslaunch(*words).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in dslaunch(*words).out


@pytest.mark.parametrize("columns", [80, 200])
def test_tables_fold_at_the_terminal_and_nothing_is_coloured_in_a_pipe(
    columns: int, dslaunch: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = dslaunch("diff", ONE, f"{ONE} training.micro_batch=2").out
    table = out.split("\nPredicted\n")[1].split("\n\n")[0]
    assert max(map(len, table.splitlines())) <= columns
    assert "\x1b" not in out


def test_every_rendered_file_is_known_as_one() -> None:
    """A folder that is compared with its recipe is read whole."""
    found = (Path(__file__).parents[1] / "golden").iterdir()
    folders = [folder for folder in found if folder.is_dir() and folder.name != "__pycache__"]
    names = {path.name for folder in folders for path in folder.iterdir()}
    assert {"gpus.py", "profiled.py"} <= names
    assert [name for name in sorted(names) if not is_rendered(name)] == []
