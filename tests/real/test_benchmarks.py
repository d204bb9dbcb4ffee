"""How predictions are held against published runs."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bands import bands
from benchmarks.crossval import Held
from benchmarks.errors import Error, errors, measured_gib
from benchmarks.known import completed
from benchmarks.predict import Predicted, predict
from benchmarks.records import RUNS, Record, published, read
from benchmarks.regret import sweeps
from benchmarks.statistics import held_out_with, over_sources, summary

ROOT = Path(__file__).resolve().parents[2]


def record(**changes: object) -> Record:
    row = {
        "id": "one", "quality": "A", "framework": "Megatron-LM", "seq_len": 2048, "n_gpus": 8, "tp": 8, "pp": 1,
        "dp": 1, "micro_batch": 1, "global_batch": 8, "precision": "bf16", "distributed_optimizer": True,
        "gpu": {"type": "A100-80GB", "memory_gb": 80}, "source": {"title": "a paper"},
        "model": {
            "name": "GPT", "layers": 4, "hidden": 1024, "ffn_hidden": 4096, "heads": 16, "kv_heads": 16,
            "vocab": 51200,
            "gated_mlp": False,
        },
    }  # fmt: skip
    return Record.model_validate({**row, **changes})


def error(measured: float, predicted: float, source: str) -> Error:
    return Error(record(source={"title": source}), "time", "step_time_s", predicted, measured)


@pytest.mark.parametrize(
    ("unit", "gib"),
    [("GiB", 10.0), ("GB", 10e9 / 2**30), ("GB (nvidia-smi, MiB rounded)", 10.0), ("GiB (printed MiB)", 10.0)],
)
def test_memory_is_compared_in_gib_whatever_unit_was_printed(unit: str, gib: float) -> None:
    printed = record(measured={"peak_memory_gb": 10.0, "peak_memory_unit": unit})
    assert measured_gib(printed) == pytest.approx(gib)


@pytest.mark.parametrize("figure", ["step_time_s", "tokens_per_sec_per_gpu", "tflops_per_gpu", "samples_per_sec"])
def test_any_printed_speed_becomes_the_step_time_that_it_means(figure: str) -> None:
    foreseen = predict(record())
    assert foreseen.step_time_s is not None
    assert foreseen.tokens_per_s_per_gpu is not None
    assert foreseen.tflops_per_gpu is not None
    half_as_fast = {
        "step_time_s": foreseen.step_time_s * 2,
        "tokens_per_sec_per_gpu": foreseen.tokens_per_s_per_gpu / 2,
        "tflops_per_gpu": foreseen.tflops_per_gpu / 2,
        "samples_per_sec": foreseen.tokens_per_s_per_gpu * 8 / 2048 / 2,
    }
    (found,) = errors(record(measured={figure: half_as_fast[figure]}), foreseen)
    assert found.measured == pytest.approx(2 * foreseen.step_time_s)
    assert found.relative == pytest.approx(-0.5)


def run_of(micro_batch: int, measured: float, predicted: float, layers: int = 4) -> Held:
    one = record(micro_batch=micro_batch, measured={"step_time_s": measured})
    shape = one.model.model_copy(update={"layers": layers})
    return Held(one.model_copy(update={"model": shape}), Predicted("one", step_time_s=predicted))


def test_regret_is_of_layouts_whose_repeats_are_averaged() -> None:
    """The layout of micro_batch 1 took 12 and 8, that of 2 took 9.5."""
    (sweep,) = sweeps([run_of(1, 12, 7), run_of(1, 8, 7), run_of(2, 9.5, 8)])
    assert (sweep.runs, sweep.regret) == (3, pytest.approx(10 / 9.5 - 1))


def test_layouts_of_other_models_are_no_rivals() -> None:
    assert sweeps([run_of(1, 12, 7), run_of(2, 8, 9, layers=10)]) == []


def test_a_refused_record_has_no_error() -> None:
    assert list(errors(record(measured={"step_time_s": 1.0}), Predicted("one", refused="x"))) == []


def test_a_large_source_does_not_hide_a_small_one() -> None:
    rows = [error(1.0, 1.1, "large") for _ in range(99)] + [error(1.0, 1.5, "small")]
    alone, averaged = summary(rows), over_sources(rows)
    assert alone is not None
    assert averaged is not None
    assert alone.mean == pytest.approx(0.104)
    assert averaged.mean == pytest.approx(0.3)


def test_a_band_leaves_a_twentieth_of_the_weight_on_either_side() -> None:
    rows = [error(0.5 + i / 100, 1.0, "one source") for i in range(100)]
    band = bands(rows)["time"]["megatron"]
    assert (band["low"], band["high"]) == (pytest.approx(0.545, abs=0.006), pytest.approx(1.445, abs=0.006))
    assert (band["runs"], band["sources"]) == (100, 1)


def test_releases_of_one_page_are_held_out_together() -> None:
    releases = [r for r in published() if "Megatron-Bridge performance summary" in r.source.title]
    assert len({r.source.title for r in releases}) > 5
    assert len({held_out_with(r) for r in releases}) == 1


def test_a_record_without_a_needed_fact_is_refused_by_name() -> None:
    refused = predict(record(model={"name": "a model of nobody's"})).refused
    assert refused is not None
    assert "model.layers" in refused


def test_null_is_unknown_wherever_it_stands(tmp_path: Path) -> None:
    rows = [dict.fromkeys(Record.model_fields), record().model_dump() | {"tags": None, "framework": None}]
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([row | {"id": "x"} for row in rows]))
    nothing, most = (predict(row) for row in read(file))
    assert nothing.refused
    assert most.refused is None
    mixture = record(model={**record().model.model_dump(), "moe": {"num_experts": 8, "topk": None}})
    assert predict(mixture).refused == "model.moe.topk is not given"


def test_a_record_that_contradicts_itself_is_refused_alone() -> None:
    refused = predict(record(model={**record().model.model_dump(), "heads": 15})).refused
    assert refused is not None
    assert "heads" in refused


def test_what_usage_tells_of_a_record_is_filled_in() -> None:
    bare = record(seq_len=None, micro_batch=None, global_batch=None)
    assert (completed(bare).seq_len, completed(bare).micro_batch) == (2048, 4)
    tuned = record(seq_len=None, micro_batch=None, global_batch=None, category="lora")
    assert (completed(tuned).seq_len, completed(tuned).micro_batch) == (512, 16)
    shared = record(seq_len=2048, micro_batch=None, global_batch=3, n_gpus=1, dp=1)
    assert completed(shared).micro_batch == 3


def test_layers_follow_from_the_parameters() -> None:
    shape = {"name": "GPT", "params_b": 174.6, "hidden": 12288, "vocab": 51200, "gated_mlp": False}
    assert completed(record(model=shape)).model.layers == 96


def test_mends_name_records_that_exist_and_say_why() -> None:
    import yaml

    ids = {row["id"] for row in json.loads(RUNS.read_text(encoding="utf-8"))}
    for mend in yaml.safe_load((RUNS.parent / "mends.yaml").read_text(encoding="utf-8")):
        assert set(mend) == {"records", "set", "evidence"}
        assert all(fnmatch.filter(ids, name) for name in mend["records"])
        assert len(mend["evidence"]) > 20


def test_what_is_mended_is_mended(tmp_path: Path) -> None:
    rows, mends = tmp_path / "runs.json", tmp_path / "mends.yaml"
    rows.write_text('[{"id": "a", "model": {"vocab": null}, "micro_batch": 1}, {"id": "b", "micro_batch": 1}]')
    mends.write_text("- {records: [a], set: {model.vocab: 51200, micro_batch: 2}, evidence: seen}\n")
    first, second = read(rows, mends)
    assert (first.model.vocab, first.micro_batch, second.micro_batch) == (51200, 2, 1)


def test_predict_prints_a_line_for_each_record(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    rows = (record(), record(id="two", model={"name": "?"}))
    file.write_text("".join(row.model_dump_json() + "\n" for row in rows))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.predict", str(file)], cwd=ROOT, capture_output=True, text=True,
        check=True
    )
    one, two = (json.loads(line) for line in done.stdout.splitlines())
    assert set(one) == {
        "id", "peak_memory_gib", "memory_kind", "step_time_s", "tflops_per_gpu", "tokens_per_s_per_gpu", "fits",
        "refused",
    }  # fmt: skip
    assert one["refused"] is None
    assert one["fits"] is True
    assert 0 < one["peak_memory_gib"] < 80
    assert one["tokens_per_s_per_gpu"] * one["step_time_s"] == pytest.approx(8 * 2048 / 8)
    assert two["refused"]
    assert two["step_time_s"] is None


def test_predict_says_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    file.write_text('[{"id": "x", "tp": "many"}]')
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.predict", str(file)], cwd=ROOT, capture_output=True, text=True,
        check=False
    )
    assert done.returncode == 2
    assert "record x: tp" in done.stderr
    assert done.stdout == ""


def test_the_report_needs_no_plots() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import benchmarks.accuracy"
    subprocess.run([sys.executable, "-c", code], check=True)
