"""`dslaunch review`, and the GitHub Action around it, on a real repository with a recorded event."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
import yaml

from dslaunch.review.changes import FileChange
from dslaunch.review.difference import Difference
from dslaunch.reviewing import MARKER, Entry, Review, Reviewed, comment
from dslaunch.sides import named
from tests.command import RECIPE, CommandLine, make_site, valid
from tests.real.parts import need

ROOT = Path(__file__).parents[2]
WORDS = ["recipe=mine", "cluster=16xH100"]


def _git(*words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dslaunch: CommandLine) -> Path:
    """A repository with a site: one recipe whose rendering is committed, one that has none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    site = make_site(Path("site"), RECIPE)
    (site / "recipes" / "other.yaml").write_text(RECIPE.replace("name: mine", "name: other"))
    (site / "renderings.yaml").write_text("rendered/mine: recipe=mine cluster=16xH100\n")
    dslaunch("render", *WORDS, "--config-dir", "site", "-o", "site/rendered/mine")
    _git("init", "-q")
    _git("add", ".")
    _git("commit", "-q", "-m", "base")
    return site


def _change(site: Path, name: str, old: str, new: str) -> None:
    path = site / "recipes" / f"{name}.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_no_change_says_so(site: Path, dslaunch: CommandLine) -> None:
    ran = dslaunch("review", "HEAD", "--config-dir", "site")
    assert ran.status == 0
    assert "0 of 2 plans change" in ran.out


def test_a_micro_batch_without_its_rendering_is_stale(site: Path, dslaunch: CommandLine) -> None:
    _change(site, "mine", "seq_len: 4096", "seq_len: 4096\n  micro_batch: 2")
    ran = dslaunch("review", "HEAD", "--config-dir", "site", "--comment", "comment.md")
    assert ran.status == 6
    assert "site/rendered/mine is stale (blueprint.json, ds_config.json, plan.json)" in ran.out
    assert "components.llm.micro_batch" in ran.out
    assert Path("comment.md").read_text().startswith("<!-- dslaunch review -->\n")
    dslaunch("render", *WORDS, "--config-dir", "site", "-o", "site/rendered/mine")
    again = dslaunch("review", "HEAD", "--config-dir", "site")
    assert (again.status, "1 of 2 plans change, nothing speaks against it" in again.out) == (0, True)


def _planned(dslaunch: CommandLine, *words: str) -> list[str]:
    found = dslaunch("review", "HEAD", "--config-dir", "site", "--json", *words).json
    valid(found, "dslaunch.review/1", dslaunch)
    return [each["plan"] for each in found["plans"]]


def test_only_what_the_change_can_touch_is_planned(site: Path, dslaunch: CommandLine) -> None:
    assert _planned(dslaunch) == []
    assert _planned(dslaunch, "--all") == ["recipe=mine cluster=16xH100", "recipe=other"]
    _change(site, "other", "seq_len: 4096", "seq_len: 2048")
    assert _planned(dslaunch) == ["recipe=other"]
    (site / "README.md").write_text("not read")
    assert _planned(dslaunch) == ["recipe=other"]
    (site / "rendered" / "mine" / "env.sh").write_text("")
    assert _planned(dslaunch) == ["recipe=mine cluster=16xH100", "recipe=other"]


@pytest.mark.parametrize(
    ("file", "text", "touched"),
    [
        ("conf/model/llama3_8b.yaml", None, ["mine", "other"]),
        ("conf/model/gpt2.yaml", None, []),
        ("conf/cluster/H100-80GB.yaml", None, ["mine", "other"]),  # H100 names it in its defaults
        ("conf/cluster/fast.yaml", "defaults: [H100, _self_]\n", []),
        ("conf/goal/throughput.yaml", None, ["mine", "other"]),  # the package's base.yaml names it
        ("templates/env.sh.j2", None, ["mine", "other"]),
        ("dslaunch.yaml", "rules: {ignore: [pipeline.bubble]}\n", ["mine", "other"]),
        ("recipes/third.yaml", RECIPE.replace("name: mine", "name: third"), ["third"]),
    ],
)
def test_a_file_touches_the_plans_that_it_has_a_say_in(
    file: str, text: str | None, touched: list[str], site: Path, dslaunch: CommandLine
) -> None:
    """Where there is no text, the package's file is copied to the site's folder."""
    (site / file).parent.mkdir(parents=True, exist_ok=True)
    (site / file).write_text((ROOT / file).read_text() if text is None else text)
    names = [word.split()[0].removeprefix("recipe=") for word in _planned(dslaunch)]
    assert names == touched


def test_a_file_that_is_gone_touches_what_named_it(site: Path, dslaunch: CommandLine) -> None:
    (site / "conf" / "cluster" / "H100.yaml").write_text("defaults: [H200]\n")
    _git("add", ".")
    _git("commit", "-q", "-m", "another H100")
    (site / "conf" / "cluster" / "H100.yaml").unlink()
    assert len(_planned(dslaunch)) == 2


def test_another_prediction_makes_nothing_stale(site: Path, dslaunch: CommandLine) -> None:
    path = site / "rendered" / "mine" / "prediction.json"
    path.write_text(path.read_text().replace('"mfu"', '"mfu" '))
    assert dslaunch("review", "HEAD", "--config-dir", "site").status == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("override strategy: zero3", "override strategy: ddp", "memory.gpu: does not fit"),
        ("name: other", "name: other\nstrategy: {llm: {tp: 3}}", "no plan"),
    ],
)
def test_a_recipe_that_stops_fitting_must_not_land(
    old: str, new: str, said: str, site: Path, dslaunch: CommandLine
) -> None:
    _change(site, "other", old, new)
    ran = dslaunch("review", "HEAD", "--config-dir", "site", "--sarif", "found.sarif")
    assert ran.status == 6
    assert said in ran.out
    results = json.loads(Path("found.sarif").read_text())["runs"][0]["results"]
    places = [r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in results]
    assert all(Path(place).exists() for place in places)
    if said != "no plan":
        assert "site/recipes/other.yaml" in places


def test_a_new_recipe_has_no_base(site: Path, dslaunch: CommandLine) -> None:
    (site / "recipes" / "third.yaml").write_text(RECIPE.replace("name: mine", "name: third"))
    ran = dslaunch("review", "HEAD", "--config-dir", "site")
    assert ran.status == 0
    assert "No plan at the base: recipe=third at HEAD: recipe=third: no such recipe." in ran.out
    assert "There are" not in ran.out
    assert "| llm | TP1 PP1 DP8 ZeRO-3" in ran.out
    assert re.search(r"^\| memory of the fullest GPU, GiB \| [\d.]+ \| of 79.65 GiB \|$", ran.out, re.M)


def test_a_recipe_that_is_gone_is_named(site: Path, dslaunch: CommandLine) -> None:
    (site / "recipes" / "other.yaml").unlink()
    ran = dslaunch("review", "HEAD", "--config-dir", "site")
    assert (ran.status, "Gone: `recipe=other`." in ran.out) == (0, True)
    found = dslaunch("review", "HEAD", "--config-dir", "site", "--json").json
    valid(found, "dslaunch.review/1", dslaunch)
    assert found["gone"] == ["other"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config-dir", "site"], "review takes one revision"),
        (["HEAD", "--config-dir", "nowhere"], "no such folder"),
        (["HEAD"], "--config-dir"),
        (["nosuch", "--config-dir", "site"], "nosuch"),
    ],
)
def test_mistakes_are_answered(words: list[str], said: str, site: Path, dslaunch: CommandLine) -> None:
    ran = dslaunch("review", *words)
    assert (ran.status, said in ran.err) == (2, True), ran


def test_renderings_that_say_nothing_are_refused(site: Path, dslaunch: CommandLine) -> None:
    (site / "renderings.yaml").write_text("rendered/mine: 16xH100\n")
    assert "say recipe=NAME" in dslaunch("review", "HEAD", "--config-dir", "site").err


def test_a_long_comment_is_cut_between_blocks_and_stays_markdown() -> None:
    change = FileChange(
        "ds_config.json", "changed", "convergence", tuple(f"+ {n} {'x' * 200}" for n in range(200))
    )
    one = Difference("a", "b", ("convergence",), (), (), (), (change, change), (), (), ())
    found = tuple(Reviewed(Entry(named(f"recipe=r{n}"), None), (), one) for n in range(3))
    text = comment(Review("main", 3, found))
    assert len(text) < 65_536
    assert text.count("<details>") == text.count("</details>") == 2
    assert "too long for a comment" in text


def _step(name: str) -> dict[str, Any]:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    found: dict[str, Any] = next(step for step in action["runs"]["steps"] if step["name"] == name)
    return found


def test_the_action_reviews_a_recorded_event(site: Path, tmp_path: Path) -> None:
    """A pull request that changes micro-batch and tensor parallelism; the step's script as the action holds it."""
    base = _git("rev-parse", "HEAD")
    _change(site, "mine", "seq_len: 4096", "seq_len: 4096\n  micro_batch: 2")
    _change(site, "other", "name: other", "name: other\nstrategy: {llm: {tp: 2}}")
    _git("commit", "-q", "-a", "-m", "change")
    (tmp_path / "event.json").write_text(json.dumps({"pull_request": {"number": 7, "base": {"sha": base}}}))
    files = {"GITHUB_EVENT_PATH": "event.json", "GITHUB_OUTPUT": "output", "GITHUB_STEP_SUMMARY": "summary"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **files, "RUNNER_TEMP": str(tmp_path), "SITE": "site", "PATH": path}
    script = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", _step("Review")["run"]]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    output = dict(line.split("=", 1) for line in (tmp_path / "output").read_text().splitlines())
    text = Path(output["comment"]).read_text()
    assert output["status"] == "6"
    assert text == (tmp_path / "summary").read_text()
    assert "TP2" in text
    assert "is stale" in text
    assert "2 of 2 plans change, 1 must not land" in text
    (run,) = json.loads(Path(output["sarif"]).read_text())["runs"]
    places = [each["locations"][0]["physicalLocation"] for each in run["results"]]
    recipe = (site / "recipes" / "mine.yaml").read_text().splitlines()
    lines = [
        recipe[place["region"]["startLine"] - 1]
        for place in places
        if place["artifactLocation"]["uri"] == "site/recipes/mine.yaml"
    ]
    assert "training:" in lines
    assert text.startswith(f"{MARKER}\n")


class _Host(BaseHTTPRequestHandler):
    """Keeps the comments of one change as GitHub's and GitLab's interfaces do."""

    server: _Server

    def do_GET(self) -> None:
        self._answer(self.server.notes)

    def do_POST(self) -> None:
        note = {"id": 40 + len(self.server.notes), "body": self._body()}
        self.server.notes.append(note)
        self._answer(note)

    def do_PUT(self) -> None:
        (note,) = [n for n in self.server.notes if self.path.endswith(f"/{n['id']}")]
        note["body"] = self._body()
        self._answer(note)

    def do_PATCH(self) -> None:
        self.do_PUT()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _body(self) -> str:
        sent = self.rfile.read(int(self.headers["Content-Length"])).decode()
        form = self.headers["Content-Type"] == "application/x-www-form-urlencoded"
        return str(parse_qs(sent)["body"][0] if form else json.loads(sent)["body"])

    def _answer(self, value: object) -> None:
        allowed = "secret" in (self.headers["PRIVATE-TOKEN"] or self.headers["Authorization"] or "")
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())


class _Server(ThreadingHTTPServer):
    notes: list[dict[str, Any]]


@pytest.fixture
def host() -> Iterator[_Server]:
    """A server whose comments begin with somebody else's."""
    server = _Server(("127.0.0.1", 0), _Host)
    server.notes = [{"id": 7, "body": "Nice."}]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


GH = """\
#!/bin/bash
# The part of `gh api` that the action uses, on curl and jq.
set -euo pipefail
method=GET filter=. data=() path=
while (($#)); do
  case $1 in
    api | --paginate | --silent) ;;
    --method) method=$2; shift ;;
    --jq) filter=$2; shift ;;
    -F)
      data=(--json "$(jq -n --rawfile body "${2#body=@}" '{body: $body}')")
      [[ $method != GET ]] || method=POST
      shift
      ;;
    *) path=$1 ;;
  esac
  shift
done
curl -sSf -H "Authorization: $GH_TOKEN" -X "$method" "${data[@]}" "$GH_URL/$path" | jq -r "$filter"
"""


def _run(script: str, **environment: str) -> int:
    path = f"{Path.cwd()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        env={**os.environ, "PATH": path, **environment}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 6), done.stderr
    return done.returncode


def test_the_actions_comment_is_written_once_and_then_updated(site: Path, host: _Server) -> None:
    need("curl", "jq")
    Path("gh").write_text(GH)
    Path("gh").chmod(0o755)
    for said in ("first", "second"):
        Path("comment.md").write_text(f"{MARKER}\n{said}\n")
        _run(
            _step("Comment")["run"], GH_URL=f"http://127.0.0.1:{host.server_port}", GH_TOKEN="secret", PULL="7",
            GITHUB_REPOSITORY="owner/site", COMMENT="comment.md",
        )  # fmt: skip
        assert [note["body"] for note in host.notes] == ["Nice.", f"{MARKER}\n{said}\n"]


def test_the_gitlab_job_writes_one_note_and_fails_where_a_plan_must_not_land(site: Path, host: _Server) -> None:
    need("curl")
    page = (ROOT / "docs" / "review.md").read_text(encoding="utf-8")
    (block,) = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "CI_API_V4_URL" in text]
    install, *lines = yaml.safe_load(block)["plans"]["script"]
    assert install.startswith("pip install")
    variables = {
        "CI_MERGE_REQUEST_DIFF_BASE_SHA": _git("rev-parse", "HEAD"), "REVIEW_TOKEN": "secret",
        "CI_API_V4_URL": f"http://127.0.0.1:{host.server_port}/api/v4", "CI_PROJECT_ID": "3",
        "CI_MERGE_REQUEST_IID": "9",
    }  # fmt: skip
    _change(site, "mine", "seq_len: 4096", "seq_len: 4096\n  micro_batch: 2")
    assert _run("\n".join(lines), **variables) == 6
    assert "is stale" in host.notes[1]["body"]
    _git("checkout", "-q", ".")
    assert _run("\n".join(lines), **variables) == 0
    assert "nothing speaks against it" in host.notes[1]["body"]
    assert len(host.notes) == 2


def test_the_hook_runs_what_there_is(site: Path, dslaunch: CommandLine) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    words = [*hook["entry"].split(), *hook["args"]]
    assert words[0] == "dslaunch"
    os.chdir("site")
    assert dslaunch(*words[1:]).status == 0


def test_the_actions_scripts_are_clean() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    for name in ("Install dslaunch", "Review", "Comment", "Verdict"):
        done = subprocess.run(
            ["shellcheck", "-s", "bash", "-"],
            input=_step(name)["run"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
