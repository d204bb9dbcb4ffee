"""Every file in conf/model: valid, with its source, and as large as its comment says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dslaunch.model.params import params
from dslaunch.paths import data_root
from dslaunch.schema.model import Model

FILES = sorted((data_root() / "conf" / "model").glob("*.yaml"))


def load(path: Path) -> Model:
    return Model.model_validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_model_file_is_valid_and_named_after_its_file(path: Path) -> None:
    model = load(path)
    assert model.name == path.stem
    assert model.source


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_edges_carry_what_a_tower_puts_out_into_widths_that_fit(path: Path) -> None:
    model = load(path)
    for edge in model.edges:
        source = model.components[edge.source]
        if source.arch == "vit":
            assert edge.tokens == source.patches * source.passes
    for name, component in model.components.items():
        if component.arch != "mlp":
            continue
        sources = [model.components[e.source] for e in model.edges if e.to == name]
        targets = [model.components[e.to] for e in model.edges if e.source == name]
        assert component.dims[0] == sum(c.hidden for c in sources if c.arch != "mlp")
        assert [component.dims[-1]] == [c.hidden for c in targets if c.arch != "mlp"]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("openvla_7b", 7_541_237_184),  # bf16 safetensors of 15,082,474,368 bytes
        ("vla70b", 70_553_706_496 + 1_011_203_840 + 78_659_584),
        ("vla_tiny", 766_144),
    ],
)
def test_published_sizes(name: str, count: int) -> None:
    model = load(data_root() / "conf" / "model" / f"{name}.yaml")
    assert sum(params(component) for component in model.components.values()) == count
