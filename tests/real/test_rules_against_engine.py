"""The rules against deepspeed.initialize and a first step: what we call an error raises, what we pass trains."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.real.parts import need

need("torch", "deepspeed")

from dslaunch.engines.deepspeed_keys import table  # noqa: E402
from dslaunch.files.fileset import FileSet, read_fileset  # noqa: E402
from dslaunch.rules.checking import hits  # noqa: E402
from dslaunch.rules.settings import NEWEST_DEEPSPEED, Settings  # noqa: E402
from tests.cases.load import Case, all_cases  # noqa: E402
from tests.real.agreeing import Judged, agree  # noqa: E402
from tests.real.engine_draws import Asked, runs  # noqa: E402
from tests.real.engine_worker import WORLD  # noqa: E402
from tests.real.explained import leads_to  # noqa: E402

_JUDGES = ("DeepSpeedConfig", "deepspeed.initialize")
_ADAM = {"type": "AdamW", "params": {"lr": 0.0001, "torch_adam": True}}

_ADDRESS = re.compile(r"KeyError\(\d{12,}\)")


class Engine:
    """A process that answers what deepspeed.initialize and a step raise."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.real.engine_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def raises(self, asked: Asked) -> str | None:
        """What it raises; a KeyError of an address in memory, met once in 9,000, is asked again."""
        raised = self._answer(asked)
        return self._answer(asked) if raised and _ADDRESS.fullmatch(raised) else raised

    def _answer(self, asked: Asked) -> str | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked.line()) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process ended at {asked}"
        raised: str | None = json.loads(answer)
        return raised

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    started = Engine()
    yield started
    started.close()


def refused(config: dict[str, Any], options: Settings) -> list[str]:
    """Rules that say that DeepSpeed refuses this, when it reads it, builds the engine, or takes a step."""
    return errors(read_fileset({"ds_config.json": json.dumps(config)}), options)


def errors(files: FileSet, options: Settings) -> list[str]:
    return [
        rule.id
        for rule, hit in hits(None, files, options)
        if (hit.severity or rule.severity) == "error" and (hit.raised_by or rule.raised_by) in _JUDGES
    ]


def refused_run(asked: Asked) -> list[str]:
    """The same of a configuration beside the script that runs it."""
    files = read_fileset({"ds_config.json": json.dumps(asked.config), "train.py": asked.script()})
    options = Settings(world_size=asked.world, pp=asked.stages, huggingface=False)
    return errors(files, options)


def runnable(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with an optimizer that needs no compiler."""
    optimizer = config.get("optimizer", _ADAM)
    if isinstance(optimizer, dict) and str(optimizer.get("type")).lower() in ("adam", "adamw"):
        params = optimizer.get("params")
        optimizer = {
            **optimizer,
            "params": {**(params if isinstance(params, dict) else {}), "torch_adam": True},
        }
    return {**config, "optimizer": optimizer}


def judged_cases() -> list[tuple[Case, dict[str, Any]]]:
    found = []
    for case in all_cases():
        one_file = list(case.files) == ["ds_config.json"]
        if case.real or case.plan or not one_file or case.settings.deepspeed_version != NEWEST_DEEPSPEED:
            continue
        file = read_fileset(case.files).files[0]
        if isinstance(file.value, dict) and not file.problems and case.settings.world_size == WORLD:
            found.append((case, runnable(file.value)))
    return found


def test_cases_are_judged_as_the_engine_judges_them(engine: Engine) -> None:
    wrong = []
    cases = judged_cases()
    for case, config in cases:
        raised = engine.raises(Asked(config, case.settings.pp or 1))
        ours = refused(config, case.settings)
        if bool(ours) != (raised is not None):
            wrong.append(f"{case.rule} {case.name}: DeepSpeed {raised}, dslaunch {ours}")
        elif raised is not None and not leads_to(raised, ours):
            wrong.append(f"{case.rule} {case.name}: explain --symptom {raised!r} names none of {ours}")
    print(f"{len(cases)} cases, {len(wrong)} disagreements")
    assert wrong == []
    assert len(cases) > 150


IN_PLACE = ["x", [], None, {}, "", ["a"], 0, 5, False, True, "auto", 1.5]
"""What somebody may write where a section belongs."""


def in_place(values: list[Any]) -> Iterator[dict[str, Any]]:
    """Each section of the key table with one of these values in its place, in a configuration that runs."""
    for path, section in table().sections.items():
        for name in (name for name, key in section.keys.items() if key.type in ("section", "dict")):
            for value in values:
                config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "optimizer": dict(_ADAM)}
                holder = config
                for part in filter(None, path.split(".")):
                    holder = holder.setdefault(part, {})
                if path.startswith("zero_optimization"):
                    config["zero_optimization"]["stage"] = 3 if "offload" in path else 1
                if path.startswith("data_efficiency"):
                    holder.setdefault("enabled", True)
                holder[name] = value
                yield config


@pytest.mark.parametrize(
    "values", [IN_PLACE[:3], pytest.param(IN_PLACE[3:], marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_values_in_place_of_sections_are_judged_as_the_engine_judges_them(
    engine: Engine, values: list[Any]
) -> None:
    wrong, count = [], 0
    for count, config in enumerate(in_place(values), 1):  # noqa: B007
        raised, ours = engine.raises(Asked(config)), refused(config, Settings(world_size=WORLD, huggingface=False))
        if bool(ours) != (raised is not None):
            wrong.append(f"{config}: DeepSpeed {raised}, dslaunch {ours}")
    print(f"{count} values in place of sections, {len(wrong)} disagreements")
    assert wrong == []
    assert count > 100


def some(**keys: Any) -> st.SearchStrategy[dict[str, Any]]:
    """An object with some of these keys, each drawn from its values."""
    return st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(values) for name, values in keys.items()}
    )


BOOLS = [True, False]
TYPES = ["fp32", "bf16", "fp16", "float8"]
OPTIMIZERS = st.one_of(
    st.just(_ADAM),
    st.fixed_dictionaries({
        "type": st.sampled_from(["SGD", "RMSprop", "sgd", "OneBitAdam", "FusedLamb", "Adagrad"]),
        "params": some(lr=[0.1, "0.1"], weight_decay=[0.1], max_grad_norm=[1.0]),
    }),
    st.fixed_dictionaries({
        "type": st.sampled_from(["Adam", "adamw"]),
        "params": st.builds(
            lambda more: {"torch_adam": True, **more},
            some(
                lr=[0.1, "1e-4"], betas=[[0.9, 0.95], ["0.9", "0.95"]], weigth_decay=[0.1], adam_w_mode=BOOLS,
                fused=[False],
            ),
        ),
    }),
)  # fmt: skip
SCHEDULERS = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "Warmup"])},
        optional={"params": some(
            warmup_num_steps=[0, 10, 2.5, "auto"], total_num_steps=[100], warmup_type=["linear", "x"],
            warmup_max_lr=[0.1, "0.1"],
        )},
    ),
    st.fixed_dictionaries({"type": st.just("StepLR"), "params": st.just({"step_size": 5})}),
    st.fixed_dictionaries({
        "type": st.just("OneCycle"),
        "params": some(cycle_min_lr=[0.1], cycle_max_lr=[0.2], cycle_first_step_size=[0, 5]),
    }),
    st.fixed_dictionaries({
        "type": st.just("LRRangeTest"), "params": some(lr_range_test_step_size=[0, 5], lr_range_test_min=[0.1]),
    }),
)  # fmt: skip
OFFLOAD = some(device=["cpu", "none"], pin_memory=[False], ratio=[1.0, 0.5], super_offload=[False])
ZERO = st.builds(
    lambda stage, options, offload: {"stage": stage, **options, **offload},
    st.sampled_from([0, 1, 1, 1, 2, 2, 2, 2, 3]),
    some(
        allgather_bucket_size=[1000, 1001], reduce_scatter=BOOLS, compute_grad_norm=BOOLS, legacy_stage1=BOOLS,
        elastic_checkpoint=BOOLS, overlap_comm=BOOLS, zero_hpz_partition_size=[1, 2, 3, 16],
        contiguous_gradients=BOOLS, round_robin_gradients=BOOLS, reduce_bucket_size=[1000, 0],
        stage3_max_live_parameters=[1000], ignore_unused_parameters=BOOLS,
    ),
    st.one_of(st.just({}), st.builds(lambda to: {"offload_optimizer": to}, OFFLOAD)),
)  # fmt: skip
SECTIONS: dict[str, st.SearchStrategy[Any]] = {
    "zero_optimization": ZERO,
    "bf16": some(
        enabled=BOOLS, bf16_master_weights_and_grads=BOOLS, bf16_optimizer_states=BOOLS, check_grad_overflow=BOOLS
    ),
    "fp16": some(enabled=BOOLS, loss_scale=[0, 128], fp16_master_weights_and_grads=[False, False, True]),
    "optimizer": OPTIMIZERS,
    "scheduler": SCHEDULERS,
    "data_types": some(grad_accum_dtype=TYPES, param_dtype=TYPES),
    "torch_autocast": some(
        enabled=BOOLS, dtype=["bf16", "x"], lower_precision_safe_modules=[["Linear"], ["torch.nn.Linear"]]
    ),
    "tensor_parallel": some(autotp_size=[0, 1, -2, 16]),
    "expert_parallel": some(
        enabled=BOOLS, autoep_size=[1, 2, 3], expert_tensor_parallel_size=[1, 2], preset_model=["x"],
        comm_backend=["comm", "deepep", "x"], comm_max_tokens_per_rank=[64],
    ),
    "checkpoint": some(load_universal=BOOLS, tag_validation=["Warn", "x"]),
    "gradient_clipping": st.sampled_from([0, 1.0, 0.5, "auto", "1.0", None]),
    "gradient_accumulation_steps": st.sampled_from([1, 2]),
    "prescale_gradients": st.booleans(),
    "gradient_predivide_factor": st.sampled_from([1.0, 2.0]),
    "gradient_allreduce_op": st.sampled_from(["mean", "sum", "max"]),
    "communication_data_type": st.sampled_from(["fp32", "bf16", "none"]),
    "managed_gradient_accumulation": st.booleans(),
    "zero_allow_untested_optimizer": st.booleans(),
    "steps_per_print": st.sampled_from([1, "1"]),
    "log_level": st.sampled_from(["info", "loud"]),
    "wall_clock_breakdown": st.booleans(),
    "flops_profiler": some(enabled=BOOLS, profile_step=[100]),
    "no_such_key": st.just(1),
}  # fmt: skip


@st.composite
def mixtures(draw: st.DrawFn) -> Asked:
    """A configuration of some sections that interact, right and wrong together, in a pipeline or not."""
    names = draw(st.lists(st.sampled_from(sorted(SECTIONS)), max_size=5, unique=True))
    if draw(st.integers(0, 3)):
        names = sorted({*names, "zero_optimization"})
    config = {"train_micro_batch_size_per_gpu": 1, **{name: draw(SECTIONS[name]) for name in names}}
    return Asked(runnable(config), draw(st.sampled_from([1, 1, 1, 1, 1, 2, 3])))


def test_generated_configurations_are_judged_as_the_engine_judges_them(engine: Engine) -> None:
    def judged(asked: Asked) -> Judged:
        return engine.raises(asked), refused_run(asked)

    agree(st.one_of(runs(), runs(), mixtures()), judged, examples=300, first_seed=7, share=6)
