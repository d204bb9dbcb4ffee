"""launcher.include and exclude choose what DeepSpeed's own launcher would."""

from __future__ import annotations

import pytest

from dslaunch.errors import ConfigError
from dslaunch.launch.hosts import filtered
from tests.real.parts import need

need("deepspeed")

HOSTS = {"n1": [0, 1, 2, 3], "n2": [0, 1], "n3": [0, 1, 2, 3]}
TEXTS = [
    "n1", "n3@n1", "n1:0,2@n2", "n3:3,1", "n1:0@n1:2", "n1:0,0", "n2:0,1", "n1@n2@n3", "n4", "n2:2", "n1:", "n1:a",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("key", ["include", "exclude"])
def test_the_grammar_is_deepspeeds(key: str, text: str) -> None:
    from deepspeed.launcher.runner import parse_resource_filter

    try:
        theirs = parse_resource_filter(HOSTS, **{f"{key}_str": text})
    except ValueError:
        with pytest.raises(ConfigError, match=rf"launcher\.{key}: "):
            filtered(HOSTS, **{"include": "", "exclude": "", key: text})
    else:
        ours = filtered(HOSTS, **{"include": "", "exclude": "", key: text})
        assert [(host, list(slots)) for host, slots in ours.items()] == list(theirs.items())
