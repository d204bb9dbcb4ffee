"""The Trainer's arguments, drawn, against transformers: built, trained with, evaluated and saved on one CPU."""

from __future__ import annotations

import gc
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.real.parts import need

need("transformers", "accelerate", "torch")

from dslaunch.files.fileset import read_fileset  # noqa: E402
from dslaunch.rules.checking import hits  # noqa: E402
from dslaunch.rules.settings import Settings  # noqa: E402
from tests.cases.load import all_cases  # noqa: E402
from tests.real.agreeing import Judged, agree  # noqa: E402
from tests.real.explained import leads_to  # noqa: E402

Trained = Callable[[dict[str, Any]], Exception | None]
_ALWAYS: dict[str, Any] = {"output_dir": "out", "per_device_train_batch_size": 4, "num_train_epochs": 1}
_NUMBERS: list[Any] = [0, 1, -1, 2, 0.5, 1.5, None, "2", "x", ["a"], {"a": 1}]
_WORDS: list[Any] = ["no", "steps", "steps", "epoch", "epoch", "epochs", None, 1, ["steps"]]
_LEVELS: list[Any] = ["info", "passive", "warn", None, 20]
DRAWN: dict[str, list[Any]] = {
    "learning_rate": [1e-3, 1e-3, *_NUMBERS], "weight_decay": [0.1, 0.1, *_NUMBERS],
    "max_grad_norm": [1.0, 1.0, *_NUMBERS], "warmup_steps": [2, 0.1, *_NUMBERS],
    "adam_beta1": [0.9, 0.5, *_NUMBERS[1:]], "adam_beta2": [0.95, 0.5, *_NUMBERS[1:]],
    "adam_epsilon": [1e-8, 1e-6, *_NUMBERS], "max_steps": [3, 3, *_NUMBERS],
    "gradient_accumulation_steps": [2, 2, *_NUMBERS], "per_device_train_batch_size": [2, 8, *_NUMBERS],
    "logging_steps": [5, 0.25, *_NUMBERS], "save_steps": [5, 4, 0.5, *_NUMBERS],
    "eval_steps": [2, 5, 0.25, 0, 1, 1.5, None, "2", "x"],
    "logging_strategy": _WORDS, "eval_strategy": _WORDS, "save_strategy": [*_WORDS, "best"],
    "hub_strategy": ["end", "every_save", "never", None],
    "lr_scheduler_type": [
        "linear", "cosine", "constant", "polynomial", "cosine_with_min_lr", "inverse_sqrt", "warmup_stable_decay",
        "reduce_lr_on_plateau", "Cosine", None,
    ],
    "lr_scheduler_kwargs": [{}, {"num_cycles": 2}, {"min_lr": 1e-5}, {"power": 2}, '{"power": 2}', None, "x", 2],
    "optim": ["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "rmsprop", "adagrad", "adamw", None, 1],
    "optim_args": [None, "", {"a": 1}, 3],
    "log_level": _LEVELS, "log_level_replica": _LEVELS,
    "seed": [0, 7, *_NUMBERS[2:]], "data_seed": [None, 7, "x", 0.5],
    "load_best_model_at_end": [True, True, False], "save_only_model": [True, False],
    "metric_for_best_model": ["loss", "eval_loss", None, 1, ["loss"]], "save_total_limit": [1, 0, None],
    "fp16_full_eval": [True, False], "bf16_full_eval": [True, False], "bf16": [True, False],
    "dataloader_num_workers": [0, -1, None, 0.5, "2"], "dataloader_prefetch_factor": [None, 2],
    "dataloader_persistent_workers": [True, False], "dataloader_multiprocessing_context": [None, "spawn"],
    "torch_empty_cache_steps": [None, 1, 0, 0.5, "2"], "remove_unused_columns": [True],
    "train_sampling_strategy": ["random", "sequential"], "include_for_metrics": [[], ["inputs"]],
    "debug": ["", "underflow_overflow", "underflow"], "report_to": ["none", [], ["none"], "wand"],
    "accelerator_config": [None, {"split_batches": True}, {"split_batch": True}, {}],
}  # fmt: skip
"""Values that the arguments take, and some that they don't. What asks for a package, a GPU or a hub is left out,
and a beta of 0, which the reader of JSON doesn't tell from 0.0."""


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Some arguments, half of whose values are right, and those that belong together often together."""
    together = st.sampled_from([
        ("save_strategy", "eval_strategy", "load_best_model_at_end", "eval_steps", "save_steps"),
        ("lr_scheduler_type", "lr_scheduler_kwargs"), ("optim", "adam_beta1", "adam_epsilon"),
        ("eval_strategy", "eval_steps"),
    ])  # fmt: skip
    names = draw(st.lists(st.sampled_from(sorted(DRAWN)), max_size=3, unique=True))
    names += draw(together) if draw(st.booleans()) else ()
    first = {name: draw(st.sampled_from([1, 2, 2, 99])) for name in dict.fromkeys(names)}
    values = {name: st.sampled_from(DRAWN[name][:many]) for name, many in first.items()}
    return {**_ALWAYS, **draw(st.fixed_dictionaries(values))}


@pytest.fixture
def trained(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trained]:
    """What the Trainer raises with these arguments on its way through an epoch of four steps, or None."""
    import torch
    import transformers

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)
            self.config = SimpleNamespace(to_json_string=lambda: "{}")

        def forward(self, x: Any, labels: Any) -> dict[str, Any]:
            given = self.layer(x.to(self.layer.weight.dtype))
            return {"loss": torch.nn.functional.cross_entropy(given, labels), "logits": given}

    rows = [{"x": torch.ones(4), "labels": torch.tensor(each % 2)} for each in range(16)]
    monkeypatch.chdir(tmp_path_factory.mktemp("trainer"))
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)

    def train(given: dict[str, Any]) -> Exception | None:
        try:
            fixed = {"use_cpu": True, "disable_tqdm": True, "report_to": "none"}
            arguments = transformers.TrainingArguments(**{**fixed, **given})
            trainer = transformers.Trainer(Model(), arguments, train_dataset=rows, eval_dataset=rows)
            trainer.train()
        except Exception as error:
            return error
        return None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(_ALWAYS)
        gc.collect()
        gc.freeze()  # accelerate collects for each run, and need not go through all modules each time
        yield train
    gc.unfreeze()
    logging.disable(before)


def errors(given: dict[str, Any]) -> list[str]:
    """Our errors of a file with these arguments."""
    files = read_fileset({"hf_args.json": json.dumps(given)})
    found = hits(None, files, Settings())
    return [rule.id for rule, hit in found if (hit.severity or rule.severity) == "error"]


def test_drawn_arguments_are_judged_as_the_trainer_judges_them(trained: Trained) -> None:
    def judged(given: dict[str, Any]) -> Judged:
        raised = trained(given)
        return None if raised is None else repr(raised), errors(given)

    agree(arguments(), judged, examples=60, first_seed=41, share=8)


def test_cases_are_judged_as_the_trainer_judges_them(trained: Trained) -> None:
    files = {"huggingface.type": ("hf_args.json", "more.json"), "huggingface.together": ("trainer_args.json",)}
    for case in all_cases():
        for file in case.fileset().files if case.real != "unjudged" else ():
            if file.name in files.get(case.rule, ()) and "fsdp" not in file.value:
                given = json.loads(case.files[file.name])
                raised, ours = trained({**_ALWAYS, **given}), errors(given)
                assert bool(ours) == (raised is not None), (case.name, raised)
                assert raised is None or leads_to(repr(raised), ours), raised
