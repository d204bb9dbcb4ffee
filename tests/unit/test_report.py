"""`dslaunch report`: one file that says what the plan says, whatever was typed into it."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dslaunch.run.state import State, append_event, write_state
from tests.command import CommandLine, valid
from tests.real.parts import need

need("vl_convert")
HOSTILE = "</script><script>alert(1)</script>"


class _Page(HTMLParser):
    """Ids, links to them, marks of plots, and whatever would fetch something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.anchors: list[str] = []
        self.marks: list[str] = []
        self.fetched: list[str] = []
        self.scripts = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        at = {name: value or "" for name, value in attrs}
        self.ids += [at["id"]] if "id" in at else []
        self.scripts += tag == "script"
        self.marks += [at["aria-label"]] if tag in ("path", "rect") and "aria-label" in at else []
        for name in ("src", "href", "xlink:href"):
            target = at.get(name, "")
            if target.startswith("#"):
                self.anchors.append(target[1:])
            elif target and not target.startswith("data:"):
                self.fetched.append(target)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _text(dslaunch: CommandLine, *words: str) -> str:
    ran = dslaunch("report", *words, "-o", "report.html")
    assert ran.status == 0, ran.err
    return Path("report.html").read_text(encoding="utf-8")


def test_the_page_is_whole_and_fetches_nothing(dslaunch: CommandLine) -> None:
    text = _text(dslaunch, "recipe=vla70b", "cluster=64xA100")
    page = _Page(text)
    assert page.fetched == []
    assert page.scripts == 1
    assert len(page.ids) == len(set(page.ids))
    assert set(page.anchors) <= set(page.ids)
    for section in ("plan", "memory", "time", "ranks", "findings", "files"):
        assert section in page.ids
    assert re.search(r"llm: 1 a pass x 256 passes x 2 replicas = 512 samples", text)


def test_bars_are_the_ledger_and_the_timeline_ends_with_the_step(dslaunch: CommandLine) -> None:
    words = ["recipe=vla70b", "cluster=64xA100"]
    marks = _Page(_text(dslaunch, *words)).marks
    plan = dslaunch("plan", *words, "--json").json
    stage = plan["components"]["llm"]["stages"][0]["memory_gib"]
    assert f"llm stage 0: gradients {stage['gradients']:.2f} GiB" in marks
    whole = [
        float(m.group(1)) for mark in marks if (m := re.search(r"([\d.]+) GiB$", mark)) and "fullest" in mark
    ]
    assert sum(whole) == pytest.approx(plan["peak_memory_gib"], abs=0.05)
    ends = [float(m.group(1)) for mark in marks if (m := re.search(r"to ([\d.]+) s$", mark))]
    assert max(ends) == pytest.approx(plan["step_time_s"], rel=0.01)


def test_a_plan_of_16384_gpus_is_drawn_in_as_many_rows_as_stages(dslaunch: CommandLine) -> None:
    text = _text(dslaunch, "recipe=llama3_405b", "cluster=16384xH100", "engine.path=/megatron")
    assert "nodes 0-127" in text
    assert text.count('<th scope="row">nodes ') == 16
    assert len(text) < 1_000_000


def test_a_search_shows_why_each_candidate_lost(dslaunch: CommandLine) -> None:
    text = _text(dslaunch, "recipe=llama3_8b cluster=8xH100 strategy=auto")
    plan = dslaunch("plan", "recipe=llama3_8b", "cluster=8xH100", "strategy=auto", "--json").json
    marks = "\n".join(_Page(text).marks)
    for candidate in plan["search"]["front"]:
        assert candidate["layout"] in marks
        assert candidate["verdict"] in marks


def test_what_was_typed_is_shown_and_never_run(dslaunch: CommandLine) -> None:
    text = _text(dslaunch, f"recipe=llama3_8b cluster=8xH100 'env.NOTE={HOSTILE}'")
    assert HOSTILE not in text
    assert _Page(text).scripts == 1
    assert "&lt;/script&gt;" in text


def test_a_run_stands_beside_its_prediction(dslaunch: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    dslaunch("render", "recipe=vla_tiny", "cluster=local", "-o", str(folder))
    write_state(folder, State("one", "local", "finished", exit_status=0))
    append_event(folder, "finished", why=HOSTILE)
    rows = [_step(number, loss=2.0 / number) for number in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "lo')
    text = _text(dslaunch, str(folder))
    assert "Run one: finished" in text
    assert "step 8: 0.25" in _Page(text).marks
    row = r"<th scope=\"row\">step, s</th><td>[\d.e-]+</td><td>0.5</td><td>[\d.]+ x predicted</td>"
    assert re.search(row, text)
    assert HOSTILE not in text


def _step(number: int, loss: float) -> dict[str, object]:
    return {
        "step": number, "loss": loss, "grad_norm": 1.0 if number != 3 else None, "lr": 1e-3, "samples_per_s": 16.0,
        "tokens_per_s": 1000.0, "memory_gib": 0.5, "memory_kind": "host_peak_rss",
        "step_time_s": 5.0 if number == 1 else 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "x.html"], "report takes one folder"),
        (["nowhere", "-o", "x.html"], "nowhere: no such folder"),
        (["git:HEAD", "-o", "x.html"], "git:HEAD:FOLDER"),
        (["recipe=llama3_8b", "cluster=8xH100", "-o", "no/x.html"], "there is no folder no"),
    ],
)
def test_mistakes_are_answered(words: list[str], said: str, dslaunch: CommandLine) -> None:
    ran = dslaunch("report", *words)
    assert ran.status == 2
    assert said in ran.err


def test_without_the_drawing_library_it_says_what_to_install(
    dslaunch: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    ran = dslaunch("report", "recipe=llama3_8b", "cluster=8xH100", "-o", "x.html")
    assert ran.status == 2
    assert "pip install 'dslaunch[report]'" in ran.err
    assert not Path("x.html").exists()


def test_json_names_the_file_and_its_size(dslaunch: CommandLine) -> None:
    ran = dslaunch("report", "recipe=vla_tiny", "cluster=local", "-o", "report.html", "--json")
    assert ran.json["bytes"] == Path("report.html").stat().st_size
    valid(ran.json, "dslaunch.report/1", dslaunch)
