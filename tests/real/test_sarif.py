"""What `check --format sarif` prints, against a model of the whole SARIF 2.1.0 schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import CommandLine
from tests.real.parts import need

need("sarif")

from pydantic_sarif.model import StaticAnalysisResultsFormatSarifVersion210JsonSchema as Sarif  # noqa: E402

FILES = {
    "it's 100% ä:1/ds_config.json": '{"train_batch_size": 7, "zero_optimization": {"stage": 9, "sate": 1}}',
    "run.sh": "#!/bin/sh\nexport HF_TOKEN=hf_" + "a1B2" * 9 + "\n",
    "hostfile": "a slots=8\na slots=8\n",
}


@pytest.mark.parametrize("options", ["", "--accept key.range", "--select own"])
def test_findings_on_files_are_sarif(
    dslaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    ran = dslaunch("check", *FILES, str(tmp_path / "hostfile"), "--format", "sarif", *options.split())
    Sarif.model_validate(ran.json)
    results = ran.json["runs"][0]["results"]
    findings = dslaunch("check", *FILES, str(tmp_path / "hostfile"), "--json", *options.split()).json
    assert len(results) == len(findings["findings"]) + len(findings["waived"])
    assert sum("suppressions" in result for result in results) == len(findings["waived"])


def test_findings_on_a_plan_are_sarif(dslaunch: CommandLine) -> None:
    ran = dslaunch("check recipe=vla70b cluster=16xA100 --format sarif")
    Sarif.model_validate(ran.json)
    places = [location for result in ran.json["runs"][0]["results"] for location in result["locations"]]
    assert any("logicalLocations" in place for place in places)


def test_places_are_lines_and_columns_of_encoded_names(
    dslaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "it's 100% ä:1/ds_config.json"
    Path(name).parent.mkdir()
    Path(name).write_text(FILES[name], encoding="utf-8")
    ran = dslaunch("check", name, str(tmp_path / name), "--format", "sarif", "--select", "key.range")
    places = [result["locations"][0]["physicalLocation"] for result in ran.json["runs"][0]["results"]]
    uris = {place["artifactLocation"]["uri"] for place in places}
    relative = "it%27s%20100%25%20%C3%A4%3A1/ds_config.json"
    assert relative in uris
    assert any(uri.startswith("file:///") and uri.endswith(relative) for uri in uris)
    assert {json.dumps(place["region"], sort_keys=True) for place in places} == {
        '{"startColumn": 47, "startLine": 1}',
    }  # fmt: skip


def replaced(text: str, region: dict[str, int], new: str) -> str:
    """The text with a region of SARIF's replaced."""
    starts = [0, *(at + 1 for at, sign in enumerate(text) if sign == "\n")]
    begin = starts[region["startLine"] - 1] + region["startColumn"] - 1
    end = starts[region["endLine"] - 1] + region["endColumn"] - 1
    return text[:begin] + new + text[end:]


@pytest.mark.parametrize(
    "text",
    [
        '{"train_batch_size": 8,\n "zero_optimization": {\n "stage3_gather_fp16_weights_on_model_save": true}}',
        '{\n  "train_batch_size": 8,\n  "ä": 1, "zero_optimization": true\n}',
        '{\n  "train_batch_size": 8,\n  "sparse_attention": {\n    "mode": "fixed"\n  },\n  "fp16": {}\n}\n',
    ],
)
def test_a_fix_of_sarif_is_what_fix_writes(dslaunch: CommandLine, tmp_path: Path, text: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text, encoding="utf-8")
    ran = dslaunch("check", str(path), "--select", "key", "--ignore", "key.unknown", "--format", "sarif")
    Sarif.model_validate(ran.json)
    (fix,) = [fix for result in ran.json["runs"][0]["results"] for fix in result.get("fixes", ())]
    (change,) = fix["artifactChanges"]
    (replacement,) = change["replacements"]
    applied = replaced(text, replacement["deletedRegion"], replacement["insertedContent"]["text"])
    dslaunch("check", str(path), "--select", "key", "--fix", "--yes")
    assert path.read_text(encoding="utf-8") == applied != text
    assert "fixes" not in dslaunch("check", str(path), "--format", "sarif").out
