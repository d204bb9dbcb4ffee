"""What checking costs: rules a second, and the whole catalogue on one configuration against the imports.

Run it as `python -m benchmarks.rules`. The catalogue is to cost less than the imports of the command line that
`dslaunch check FILE` needs; each figure is the median of several runs, in processor time.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

from dslaunch.files.fileset import FileSet, read_fileset
from dslaunch.rules.checking import check
from dslaunch.rules.registry import rules
from dslaunch.rules.settings import Settings

CONFIG = {
    "ds_config.json": """{
  "train_batch_size": 256,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 1,
  "gradient_clipping": 1.0,
  "steps_per_print": 100,
  "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 100}},
  "zero_optimization": {
    "stage": 3, "overlap_comm": true, "contiguous_gradients": true, "reduce_bucket_size": 500000000,
    "offload_optimizer": {"device": "cpu", "pin_memory": true}
  }
}
""",
    "run.sh": "#!/bin/bash\ndeepspeed --num_gpus 8 train.py --deepspeed_config ds_config.json\n",
}
_RUNS = 30
_PROCESSES = 5


def main() -> None:
    """Prints the figures; exits with 1 where the catalogue costs more than the imports."""
    files, settings = read_fileset(CONFIG), Settings(world_size=64)
    checking = _seconds_of_check(files, settings)
    reading = median(_timed(lambda: read_fileset(CONFIG)) for _ in range(_RUNS))
    imports = median(_seconds_of_imports() for _ in range(_PROCESSES))
    print(f"rules:              {len(rules())}")
    print(f"rules a second:     {len(rules()) / checking:,.0f}")
    print(f"reading the files:  {reading * 1e3:.2f} ms")
    print(f"whole catalogue:    {checking * 1e3:.2f} ms")
    print(f"imports of the CLI: {imports * 1e3:.0f} ms")
    if checking >= imports:
        sys.exit("the catalogue costs more than the imports")


def _seconds_of_check(files: FileSet, settings: Settings) -> float:
    check(None, files, settings)  # the tables are read once
    return median(_timed(lambda: check(None, files, settings)) for _ in range(_RUNS))


def _timed(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _seconds_of_imports() -> float:
    """Processor time that a new interpreter takes to import the command line."""
    measured = "import time; at = time.process_time(); import dslaunch.cli; print(time.process_time() - at)"
    done = subprocess.run([sys.executable, "-c", measured], capture_output=True, text=True, check=True)
    return float(done.stdout)


if __name__ == "__main__":
    main()
