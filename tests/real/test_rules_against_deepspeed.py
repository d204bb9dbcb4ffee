"""The rules against DeepSpeed's own parsers: what we call an error they refuse, what we pass they accept."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.real.parts import need

need("torch", "deepspeed")

from dslaunch.engines.deepspeed_keys import Key, Section, table  # noqa: E402
from dslaunch.files import relaxed_json  # noqa: E402
from dslaunch.files.fileset import read_fileset  # noqa: E402
from dslaunch.rules.checking import hits  # noqa: E402
from dslaunch.rules.settings import Settings  # noqa: E402
from tests.cases.load import Case, all_cases  # noqa: E402
from tests.real.agreeing import Judged, agree  # noqa: E402
from tests.real.engine_draws import right  # noqa: E402
from tests.real.explained import leads_to  # noqa: E402

CASES = all_cases()
WORLD = 8
OWN_LOOP = Settings(world_size=WORLD, huggingface=False)
Verdict = Callable[[str, int], Exception | None]

PROBES: list[Any] = [
    None, True, False, 0, 1, 2, 7, -1, 0.5, 2.0, 1e12, "auto", "x", "8", "2.0", "true", "no", "cpu", "fp16", "5e8",
    "none", [], ["a"], {}, {"enabled": True},
]  # fmt: skip

UNMODELLED: dict[str, Callable[[Any], bool]] = {
    "vocabulary_size": lambda value: value in ([], {}),
    "data_efficiency.data_sampling.curriculum_learning": lambda value: value == {"enabled": True},
    "data_efficiency.data_sampling.dynamic_batching": lambda value: value == {"enabled": True},
    "aio.use_gds": bool,
    "sequence_parallel_size": lambda _: False,
}
"""Accidents of the parser that no table states: a value that is empty, keys that need another key beside them,
GPUDirect, which depends on the machine, and a key that divides the batch where deepspeed.initialize has read the
file, and not here."""


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verdict]:
    """DeepSpeedConfig on a file, for a world of any size: what it raises, or None."""
    import deepspeed
    import deepspeed.runtime.config as config
    from deepspeed.utils import logger

    class World:
        size = 1

        def get_rank(self, *_: Any) -> int:
            return 0

        def get_world_size(self, *_: Any) -> int:
            return self.size

        def __getattr__(self, name: str) -> Any:
            return getattr(deepspeed.comm, name)

    world, path = World(), tmp_path_factory.mktemp("config") / "ds_config.json"

    def judge(text: str, size: int) -> Exception | None:
        world.size = size
        path.write_text(text, encoding="utf-8")
        try:
            config.DeepSpeedConfig(str(path))
        except Exception as error:
            return error
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "dist", world)
        patch.setattr(logger, "disabled", True)
        yield judge


def refused(text: str, options: Settings) -> list[str]:
    """Rules that say that DeepSpeedConfig refuses this text."""
    found = hits(None, read_fileset({"ds_config.json": text}), options)
    return [
        rule.id
        for rule, hit in found
        if (hit.severity or rule.severity) == "error"
        and (hit.raised_by or rule.raised_by) == "DeepSpeedConfig"
    ]


JUDGED = [
    (case, name) for case in CASES if case.real != "unjudged" and not case.plan
    for name, text in case.files.items() if read_fileset({name: text}).of("deepspeed_json")
]  # fmt: skip


@pytest.mark.parametrize(("case", "name"), JUDGED, ids=lambda value: getattr(value, "name", None))
def test_case_is_judged_as_deepspeed_judges_it(case: Case, name: str, verdict: Verdict) -> None:
    text = case.files[name]
    raised = verdict(text, case.settings.world_size or WORLD)
    ours = refused(text, case.settings)
    assert bool(ours) == (raised is not None), raised
    assert raised is None or leads_to(repr(raised), ours), raised


def probes(values_per_key: int) -> Iterator[tuple[str, Any, str]]:
    """Every key of the table, and one that no section has, each with some values of every kind."""
    chance = random.Random(20)
    for path, section in table().sections.items():
        for name in [*section.keys, "no_such_key"]:
            dotted = f"{path}.{name}" if path else name
            for value in chance.sample(PROBES, min(values_per_key, len(PROBES))):
                if not UNMODELLED.get(dotted, lambda _: False)(value):
                    yield dotted, value, configuration(path, name, value)


def configuration(path: str, name: str, value: Any) -> str:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    section = config
    for part in filter(None, path.split(".")):
        section = section.setdefault(part, {})
    if path.startswith("zero_optimization"):
        config["zero_optimization"]["stage"] = 3 if "offload" in path else 1
    section[name] = value
    return json.dumps(config)


def disagreements(values_per_key: int, verdict: Verdict) -> tuple[int, list[str]]:
    count, wrong = 0, []
    for dotted, value, text in probes(values_per_key):
        count += 1
        raised, ours = verdict(text, WORLD), refused(text, OWN_LOOP)
        if bool(ours) != (raised is not None):
            wrong.append(f"{dotted} = {value!r}: DeepSpeed {raised!r:.120}, dslaunch {ours}")
    print(f"{count} configurations of one key, {len(wrong)} disagreements")
    return count, wrong


def test_every_key_is_judged_as_deepspeed_judges_it(verdict: Verdict) -> None:
    count, wrong = disagreements(4, verdict)
    assert wrong == []
    assert count > 1000


@pytest.mark.slow
def test_every_key_with_every_value(verdict: Verdict) -> None:
    count, wrong = disagreements(len(PROBES), verdict)
    assert wrong == []
    assert count > 8000


BATCHES = st.fixed_dictionaries({}, optional={
    "train_batch_size": st.sampled_from([8, 16, 32, 12, 0, "16", 8.0]),
    "train_micro_batch_size_per_gpu": st.sampled_from([1, 2, 4, 3, -1, None, True]),
    "gradient_accumulation_steps": st.sampled_from([1, 2, 3, 0, 2.0]),
})  # fmt: skip
FREQUENT = [
    "", "zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "fp16",
    "bf16",
]  # fmt: skip
GENERATED = st.one_of(st.sampled_from(FREQUENT), st.sampled_from(sorted(table().sections)))
WORLDS = st.sampled_from([WORLD, WORLD, WORLD, 1, 2, 6, 64])


def value_of(dotted: str, key: Key) -> st.SearchStrategy[Any]:
    """Mostly what the table takes, its bounds and what lies just beyond them."""
    values = st.sampled_from([*right(dotted, key), *(["other"] if key.choices else [])] or [None])
    probes = [each for each in PROBES if not UNMODELLED.get(dotted, lambda _: False)(each)]
    return st.integers(0, 9).flatmap(lambda odd: values if odd else st.sampled_from(probes))


@st.composite
def configurations(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Some keys in some sections, right and wrong, that may contradict each other, and a number of ranks."""
    single = st.just({"train_micro_batch_size_per_gpu": 1})
    config: dict[str, Any] = dict(draw(st.one_of(single, single, single, BATCHES)))
    for path in draw(st.lists(GENERATED, max_size=4, unique=True)):
        section: Any = config
        for part in filter(None, path.split(".")):
            section = section.setdefault(part, {}) if isinstance(section, dict) else None
        names = st.lists(st.sampled_from(keys_of(table().sections[path])), max_size=5, unique=True)
        for name in draw(names) if isinstance(section, dict) else ():
            if isinstance(section.get(name), dict):
                continue
            key = table().sections[path].keys[name]
            section[name] = draw(value_of(f"{path}.{name}" if path else name, key))
    if draw(st.integers(0, 29)) == 0:
        config[draw(st.sampled_from(["zero_optimizaton", "stage", "amp", "elasticity", "train_batch_sizes"]))] = 1
    return config, draw(WORLDS)


def keys_of(section: Section) -> list[str]:
    """The keys to draw from: no removed ones, which would refuse most files for one reason."""
    removed = {name for name, key in section.keys.items() if key.removed}
    return sorted(set(section.keys) - removed - {"sequence_parallel_size", "vocabulary_size"})


def test_generated_configurations_are_judged_as_deepspeed_judges_them(verdict: Verdict) -> None:
    def judged(drawn: tuple[dict[str, Any], int]) -> Judged:
        text, world = json.dumps(drawn[0]), drawn[1]
        raised = verdict(text, world)
        ours = refused(text, Settings(world_size=world, huggingface=False))
        return None if raised is None else repr(raised), ours

    agree(configurations(), judged, examples=5000, first_seed=1, share=6)


def test_scheduler_cases_are_judged_as_the_schedulers_judge_them() -> None:
    import torch
    from deepspeed.runtime import lr_schedules

    judged = [case for case in CASES if case.rule == "scheduler.warmup" and case.real != "unjudged"]
    for case in judged:
        scheduler = relaxed_json.parse(case.files["ds_config.json"]).value["scheduler"]
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        files = read_fileset(case.files)
        error = any(
            (hit.severity or rule.severity) == "error" for rule, hit in hits(None, files, case.settings)
        )
        if error:
            with pytest.raises((ValueError, TypeError)):
                getattr(lr_schedules, scheduler["type"])(optimizer, **scheduler["params"])
        else:
            getattr(lr_schedules, scheduler["type"])(optimizer, **scheduler["params"])


def test_hostfiles_are_judged_as_the_launcher_judges_them() -> None:
    from deepspeed.launcher.runner import _parse_hostfile

    judged = [case for case in CASES if case.rule.startswith("hostfile.") and "run.sh" not in case.files]
    for case in judged:
        (text,) = case.files.values()
        files = read_fileset(case.files)
        raised_by = {hit.raised_by or rule.raised_by for rule, hit in hits(None, files, Settings())}
        if "deepspeed launcher" in raised_by:
            with pytest.raises(ValueError, match="Hostfile"):
                _parse_hostfile(text.splitlines(keepends=True))
        else:
            pool = _parse_hostfile(text.splitlines(keepends=True))
            assert pool == {line.host: line.slots for line in files.files[0].value}


def test_the_reader_accepts_what_hjson_accepts_with_the_same_values() -> None:
    import hjson

    parts = [
        "{", "}", "[", "]", ",", ",", ":", '"a"', "b", " c ", "1", "2.5", "5e8", "1e11", "-3", "true", "null",
        "\n", "# x\n", "// y\n", "/* z */", "'q'", '"\\u00e9"', "two words", " ", "01", '"a\\"b"', "\t", "x:1\n",
        '"k": ', '"k2": {', "}\n", "1.0", "'''m\n    n'''",
    ]  # fmt: skip
    chance, accepted = random.Random(3), 0
    for _ in range(20_000):
        text = '{"p": ' + "".join(chance.choice(parts) for _ in range(chance.randint(1, 8))) + "}"
        try:
            theirs = hjson.loads(text, object_pairs_hook=dict)
        except Exception:
            with pytest.raises(relaxed_json.JsonSyntaxError):
                relaxed_json.parse(text)
            continue
        accepted += 1
        assert repr(relaxed_json.parse(text).value) == repr(theirs), text
    assert accepted > 1000


def test_the_key_table_is_that_of_the_models() -> None:
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config,
        "hybrid_engine": HybridEngineConfig, "tensor_parallel": TPTrainingConfig,
    }  # fmt: skip
    for path, model in models.items():
        keys = {name: key for name, key in table().sections[path].keys.items() if not key.removed}
        names = set(model.model_fields) | {
            field.alias for field in model.model_fields.values() if field.alias
        }
        assert set(keys) == names, path
        documented = {name: key.alias_of for name, key in keys.items() if key.alias_of}
        assert documented == {
            name: field.alias for name, field in model.model_fields.items() if field.alias
        }, path


def test_the_removed_keys_are_those_of_deepspeed() -> None:
    import deepspeed.runtime.config as config

    removed = {
        path: {name for name, key in table().sections[path].keys.items() if key.removed}
        for path in ("", "zero_optimization")
    }
    assert removed[""] == set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert removed["zero_optimization"] == set(config._REMOVED_ZERO_CONFIG_KEYS)


def test_this_deepspeed_is_the_one_that_the_rules_were_verified_on() -> None:
    import deepspeed

    from dslaunch.rules.settings import NEWEST_DEEPSPEED

    assert deepspeed.__version__.startswith(NEWEST_DEEPSPEED)
    assert Path(deepspeed.__file__).exists()
