"""Changes of a JSON text: what is left is strict JSON again, with its layout."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

from dslaunch.files.fileset import read_fileset
from dslaunch.rules.edits import applied, deleted

LAYOUTS = (
    '{\n  "zero_optimization": {\n    "a": 1,\n    "b": [1, 2],\n    "c": {"x": 3},\n    "d": "4"\n  }\n}\n',
    '{"zero_optimization": {"a": 1, "b": [1, 2],\n "c": {"x": 3}, "d": "4"}}',
    '{"zero_optimization":{"a":1,"b":[1,2],"c":{"x":3},"d":"4"}}',
)
KEYS = ("a", "b", "c", "d")


@pytest.mark.parametrize("text", LAYOUTS)
def test_any_keys_taken_out_at_once_leave_the_others(text: str) -> None:
    (file,) = read_fileset({"ds_config.json": text}).files
    for count in range(1, len(KEYS) + 1):
        for keys in combinations(KEYS, count):
            edits = [edit for key in keys if (edit := deleted(file, ("zero_optimization", key)))]
            assert len(edits) == count
            left = json.loads(applied(text, edits))["zero_optimization"]
            assert set(left) == set(KEYS) - set(keys)
