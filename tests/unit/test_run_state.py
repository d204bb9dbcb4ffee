"""state.json and events.jsonl."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dslaunch.errors import ConfigError
from dslaunch.run.processes import Process
from dslaunch.run.ranks import fault
from dslaunch.run.state import State, append_event, read_events, read_state, update_state, write_state


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = State("a-1", "local", "running", process=Process(12, 12, 345))
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    update_state(tmp_path, status="failed", exit_status=3)
    assert read_state(tmp_path) == State("a-1", "local", "failed", 3, Process(12, 12, 345))


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "dslaunch.state/9"}'])
def test_what_is_no_state_is_a_mistake(text: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ConfigError, match=r"state\.json"):
        read_state(tmp_path)
    with pytest.raises(ConfigError, match="no state of a run"):
        read_state(tmp_path / "elsewhere")


def test_events_of_many_writers_do_not_mix(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: append_event(tmp_path, "tick", n=n, text="é" * 3000), range(200)))
    events = read_events(tmp_path)
    assert sorted(event["details"]["n"] for event in events) == list(range(200))
    assert {event["schema"] for event in events} == {"dslaunch.events/1"}


def test_a_crash_at_any_byte_costs_the_event_at_hand_alone(tmp_path: Path) -> None:
    """Cut at each byte, the log reads as far as it is whole, and what is added then is read too."""
    assert read_events(tmp_path) == []
    path = tmp_path / "events.jsonl"
    ends = [0]
    for kind in ("prepared", "started", "finished"):
        append_event(tmp_path, kind, text="é\n")
        ends.append(path.stat().st_size)
    text, kinds = path.read_bytes(), ["prepared", "started", "finished"]
    for size in range(len(text) + 1):
        path.write_bytes(text[:size])
        whole = [kind for kind, end in zip(kinds, ends[1:], strict=True) if end - 1 <= size]
        assert [event["kind"] for event in read_events(tmp_path)] == whole, size
        append_event(tmp_path, "resume", text="é")
        assert [event["kind"] for event in read_events(tmp_path)] == [*whole, "resume"], size


@pytest.mark.parametrize(
    ("records", "expected", "says"),
    [
        ({}, None, ""),
        ({0: "0", 1: "0"}, 2, ""),
        ({0: "0"}, None, ""),
        ({0: "0"}, 2, "only 1 of 2 ranks were started"),
        ({0: "0", 1: "running"}, 2, "rank 1 was killed before it could record"),
        ({0: "running", 1: "3"}, 2, "rank 1 exits 3"),
        ({0: "143", 1: "0", 2: "3", 3: "143"}, 4, "rank 2 exits 3 (2 more ranks after it)"),
    ],
)
def test_ranks_tell_how_they_ended(
    records: dict[int, str], expected: int | None, says: str, tmp_path: Path
) -> None:
    (tmp_path / "ranks").mkdir()
    for rank, text in records.items():
        (tmp_path / "ranks" / f"{rank}.exit").write_text(text + "\n")
    found = fault(tmp_path, expected)
    assert (found.why if found else "").startswith(says)
    assert (found is None) == (says == "")
