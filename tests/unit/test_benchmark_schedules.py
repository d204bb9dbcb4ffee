"""The order of micro-batches that a published run names."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.records import Record
from benchmarks.schedules import schedule


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ({"pp_schedule": "InterleavedZeroBubble"}, "zb-h1"),
        ({"pp_schedule": "ScheduleZBVZeroBubble"}, "zb-v"),
        ({"pp_schedule": "Interleaved1F1B"}, "interleaved"),
        ({"pp_schedule": "GPipe"}, "gpipe"),
        ({"framework": "Pith-Train (DualPipeV + FSDP)"}, "dualpipe-v"),
        ({"notes": "ZB-2P schedule"}, "zb-h2"),
        ({"notes": "V-Half"}, "zb-v-half"),
        ({"pp_schedule": "V-Min"}, "zb-v-min"),
        ({"notes": "1F1B"}, "1f1b"),
        ({"vpp": 2}, "interleaved"),
        ({"flags": {"enable-zbh1-pipeline": True}}, "zb-h1"),
        ({"flags": {"enable-zero-bubble": True, "zero-bubble-max-pending-backward": 8}}, "zb-h2"),
        ({"flags": {"zero-bubble-v-schedule": True}}, "zb-v"),
    ],
)
def test_a_record_names_it(named: dict[str, Any], found: str) -> None:
    assert schedule(Record.model_validate({"id": "run", "pp": 4, **named})) == found
    assert schedule(Record.model_validate({"id": "run", "vpp": 1, **named, "pp": 1})) in (
        "1f1b",
        "interleaved",
    )
