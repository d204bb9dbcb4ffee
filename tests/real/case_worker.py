"""A case's own files run by DeepSpeed, as one rank of 8: `python -m tests.real.case_worker`.

Reads a line of JSON a case, {"files": {name: text}, "rank": 0}, and answers with a line: what was raised on that
rank, or null, and what was logged. A `train.py` is run as it stands; where there is none, the model of
`config.json`, or else a small one, is handed to deepspeed.initialize with `ds_config.json`, and takes one pass
forward where weights are quantized. torch's fake process group answers every collective
(tests/real/engine_worker.py says what else is replaced); operators that would be compiled are left out.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.real import engine_worker


def main() -> None:
    os.environ.update(engine_worker.ENVIRONMENT, HF_HUB_OFFLINE="1")
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE="ds_config.json")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    groups, fresh = engine_worker.prepare()
    _leave_out_operators()
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    for name in ("DeepSpeed", "transformers"):
        logging.getLogger(name).addHandler(handler)
    for line in sys.stdin:
        engine_worker.restore(groups, fresh)
        log.seek(0)
        log.truncate()
        asked = json.loads(line)
        engine_worker.become(asked["rank"])
        raised = _run(asked["files"])
        answers.write(json.dumps({"raised": raised, "log": log.getvalue()}) + "\n")
        answers.flush()


def _leave_out_operators() -> None:
    """Muon then steps its other half by itself; weights are checked, and not quantized."""
    import deepspeed.ops.adam
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    del deepspeed.ops.adam.FusedAdam
    CUDAQuantizer.quantizer_cuda_module = _Quantizer()


class _Quantizer:
    """In place of the kernel: eight bits a value, and a scale a group."""

    Symmetric = 0

    def quantize(self, values: Any, groups: int, bits: int, kind: int) -> Any:
        import torch

        return values.to(torch.int8), torch.ones(groups)

    def dequantize(self, values: Any, scales: Any, groups: int, bits: int, kind: int) -> Any:
        import torch

        return values.to(torch.half)


def _run(files: dict[str, str]) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        for name, text in files.items():
            Path(name).write_text(text, encoding="utf-8")
        try:
            if "train.py" in files:
                runpy.run_path("train.py")
            else:
                _initialize("config.json" in files)
        # A warning that is raised, and an assertion of torch's, are answers too.
        except Exception as error:
            return repr(error)[:300]
        finally:
            _forget()
            sys.path.remove(folder)
            for name in {Path(each).stem for each in files}:
                if str(getattr(sys.modules.get(name), "__file__", "")).startswith(folder):
                    del sys.modules[name]
            os.chdir("/")
    return None


def _initialize(has_model: bool) -> None:
    import deepspeed
    import torch
    import transformers

    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    if has_model:
        config = transformers.AutoConfig.from_pretrained(".")
        auto = transformers.AutoModelForCausalLM
        model = auto.from_config(config) if type(config) in auto._model_mapping else _other(config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")
    if engine._config.zero_config.zero_quantized_weights:
        engine(torch.ones(1, 4, dtype=torch.long))
    engine.destroy()


def _other(config: Any) -> Any:
    import transformers

    return transformers.AutoModelForSeq2SeqLM.from_config(config)


def _forget() -> None:
    """What a script leaves in the modules of DeepSpeed, accelerate and transformers."""
    from deepspeed.runtime.tensor_parallel import init_utils

    init_utils._TP_MODEL_INIT_ARGS = None
    sequences: Any = importlib.import_module("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    sequences._SEQUENCE_PARALLEL_GROUP = sequences._SEQUENCE_DATA_PARALLEL_GROUP = None
    autocast: Any = importlib.import_module("deepspeed.runtime.torch_autocast")
    autocast._WARNED_NESTED_AUTOCAST = False
    attention: Any = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    attention._local_mapping.clear()
    state: Any = importlib.import_module("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)


if __name__ == "__main__":
    main()
