"""What a user may type, drawn at random: it is refused in clear words, or its files hold before the real parts.

DSLAUNCH_EXAMPLES asks for more draws than the default, DSLAUNCH_SEED for others. DSLAUNCH_MEGATRON_LM, a checkout
of NVIDIA/Megatron-LM at the tag core_vDSLAUNCH_MEGATRON_VERSION, lets its own parser and validation judge too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jsonschema

from dslaunch.planfile import JOINED_SCHEMA
from dslaunch.review.json_schema import json_schema
from tests.command import CommandLine
from tests.megatron_parser import parsed
from tests.real import drawn_judges as judges
from tests.real.drawn_judges import Folder, Question, Verdict, catalogue_of
from tests.real.drawn_plans import Drawn, drawn
from tests.real.megatron_judge import judging
from tests.real.megatron_lines import Line
from tests.real.parts import need

need("torch", "deepspeed", "transformers", "accelerate", "megatron", "shellcheck")

DRAWS = int(os.environ.get("DSLAUNCH_EXAMPLES", 150))
SEED = int(os.environ.get("DSLAUNCH_SEED", 1))
CHECKOUT = os.environ.get("DSLAUNCH_MEGATRON_LM", "")
AT_ONCE = 150
"""Draws whose folders stand on the disk together."""
STARTED, LINTED, TWICE = 6, 2, 1
"""Of so many draws: engines started, folders that shellcheck reads, plans made again in another process."""
SAID_ALOUD = ("model.positions",)
"""What the user asked for and is told of, in the plan as in its files."""
_UNCLEAR = re.compile(r"Traceback|<class|\bNone\b is|object at 0x|KeyError|pydantic|discriminator")
Megatron = Callable[[Line], dict[str, Any]] | None


def test_what_is_typed_is_refused_or_holds_before_the_real_parts(
    dslaunch: CommandLine, tmp_path: Path
) -> None:
    statuses: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    verdict = Verdict()
    with judging("megatron_worker.py", CHECKOUT) if CHECKOUT else nullcontext() as megatron:
        for first in range(0, DRAWS, AT_ONCE):
            root = tmp_path / str(first)
            root.mkdir()
            draws = [drawn(number, SEED) for number in range(first, min(DRAWS, first + AT_ONCE))]
            passed = [
                folder
                for draw in draws
                if (folder := _tried(draw, root, dslaunch, statuses, reasons, verdict))
            ]
            _judged(passed, verdict, megatron)
            shutil.rmtree(root)
    print(f"{DRAWS} drawn (seed {SEED}): {dict(statuses)} by status; judged: {dict(verdict.judged)}")
    print(f"{len(verdict.wrong)} disagreements; refused: {dict(reasons.most_common(12))}")
    assert not verdict.wrong, "\n".join(verdict.wrong)
    assert min(statuses[0], statuses[2] + statuses[3]) > DRAWS // 5
    assert statuses[2] > DRAWS // 20
    assert statuses[3] > DRAWS // 20


def _tried(
    draw: Drawn,
    root: Path,
    dslaunch: CommandLine,
    statuses: Counter[int],
    reasons: Counter[str],
    verdict: Verdict,
) -> Folder | None:
    """Render what was typed: the folder, or None where it is refused, in words that a user can act on."""
    path = root / str(draw.number)
    try:
        ran = dslaunch("render", "-q", *draw.words, "-o", str(path))
    except Exception as error:
        verdict.wrong.append(f"draw {draw.number}: {type(error).__name__}: {error}\n    {draw.text}")
        return None
    statuses[ran.status] += 1
    if ran.status == 0:
        folder = Folder.at(path, draw)
        _checked(folder, dslaunch, verdict)
        return folder
    reasons[re.sub(r"[\d.]+", "#", ran.err.removeprefix("dslaunch: "))[:40]] += 1
    if ran.status not in (2, 3) or not ran.err.startswith("dslaunch: ") or _UNCLEAR.search(ran.err):
        verdict.wrong.append(f"draw {draw.number}: {ran.status}: {ran.err}\n    {draw.text}")
    return None


def _checked(folder: Folder, dslaunch: CommandLine, verdict: Verdict) -> None:
    """`check` of the folder finds nothing grave, and `plan --json` is what its schema says."""
    found = dslaunch("check", str(folder.path), "--format", "json").json["findings"]
    grave = [each for each in found if each["severity"] in ("error", "wrong", "hang")]
    grave = [each for each in grave if each["rule"] not in SAID_ALOUD]
    verdict.hold(not grave, folder, f"check: {grave}")
    printed = dslaunch("plan", "--json", *folder.drawn.words).json
    try:
        jsonschema.validate(printed, json_schema(JOINED_SCHEMA))
    except jsonschema.ValidationError as error:
        verdict.hold(False, folder, f"plan --json: {error.message}")
    plan = json.loads(folder.files["plan.json"])
    joined = ("schema", "components")  # with what is predicted of each
    differ = [key for key, value in plan.items() if key not in joined and printed[key] != value]
    verdict.hold(not differ, folder, f"plan --json has another {differ}")


def _judged(passed: Sequence[Folder], verdict: Verdict, megatron: Megatron) -> None:
    asked: list[Question] = []
    lines: list[tuple[Folder, Line]] = []
    for folder in passed:
        judges.own(folder, verdict)
        judges.kubernetes(folder, verdict)
        judges.catalogues(folder, verdict)
        lines += _line(folder, verdict)
        started = sum(each.given.get("initialize", 0) for each in asked)
        asked += judges.questions(folder, verdict, engine=started < STARTED)
    judges.scripts(passed, verdict, linted=LINTED)
    judges.ask(asked, verdict)
    _core(passed, verdict)
    version = os.environ.get("DSLAUNCH_MEGATRON_VERSION", "")
    for folder, line in lines if megatron else ():
        assert megatron is not None
        if folder.plan.engine.version.split(".")[:2] == version.split(".")[:2]:
            raised = megatron(line)["raised"]
            verdict.judged["Megatron-LM"] += 1
            verdict.hold(raised is None, folder, f"Megatron-LM: {raised}")
    for folder in passed[:TWICE]:
        _again(folder, verdict)


def _line(folder: Folder, verdict: Verdict) -> Iterator[tuple[Folder, Line]]:
    """What rank.sh starts Megatron's script with."""
    if folder.plan.profile.kind == "nsys":
        return  # the script asks for nsys first
    argv, environ = judges.rank(folder, verdict)
    if argv and folder.plan.engine.name == "megatron":
        yield folder, judges.megatron_line(folder, argv, environ)


def _core(passed: Sequence[Folder], verdict: Verdict) -> None:
    """megatron-core makes stages of the plan's layers, on the plan's ranks."""
    mine = [
        f for f in passed if f.plan.engine.name == "megatron" and f.plan.engine.version.startswith("0.16")
    ]
    jobs = []
    for folder in mine:
        part = folder.plan.components["llm"]
        flags = parsed(folder.files["megatron_args.txt"], catalogue_of(folder.plan))
        jobs.append({"flags": flags, "dp": part.dp, "vpp": part.vpp, "fields": []})
    done = subprocess.run(
        [sys.executable, "-m", "tests.real.rendered_megatron"], input=json.dumps(jobs), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for folder, found in zip(mine, json.loads(done.stdout), strict=True):
        stages = folder.plan.components["llm"].stages
        verdict.judged["megatron-core"] += 1
        verdict.hold(
            found.get("layers") == [stage.layers for stage in stages], folder, f"megatron-core: {found}"
        )
        verdict.hold(
            found.get("stages") == [list(stage.ranks) for stage in stages], folder, "megatron-core: ranks"
        )


def _again(folder: Folder, verdict: Verdict) -> None:
    """Another process, with other hashes, writes the same bytes."""
    path = folder.path.parent / f"{folder.path.name}.again"
    subprocess.run(
        [sys.executable, "-m", "dslaunch", "render", "-q", *folder.drawn.words, "-o", str(path)],
        env={**os.environ, "PYTHONHASHSEED": "7"}, check=True, capture_output=True,
    )  # fmt: skip
    other = Folder.at(path, folder.drawn)
    differ = [name for name in folder.files if folder.files[name] != other.files.get(name)]
    verdict.judged["made twice"] += 1
    verdict.hold(not differ, folder, f"another process writes another {differ}")


def test_the_judges_can_refuse(dslaunch: CommandLine, tmp_path: Path) -> None:
    """A folder that was changed by hand is told apart."""
    words = ("recipe=llama3_8b", "cluster=8xH100", "engine=deepspeed", "strategy=zero3", "script=train.py")
    path = tmp_path / "0"
    assert dslaunch("render", *words, "-o", str(path)).status == 0
    config = json.loads((path / "ds_config.json").read_text())
    (path / "ds_config.json").write_text(json.dumps({**config, "train_batch_size": 7}))
    (path / "launch.sh").write_text(
        (path / "launch.sh").read_text().replace("--nproc-per-node 8", "--nproc 4 --no")
    )
    prediction = json.loads((path / "prediction.json").read_text())
    (path / "prediction.json").write_text(json.dumps({**prediction, "peak_memory_gib": 500.0}))
    folder, verdict = Folder.at(path, Drawn(0, words, False)), Verdict()
    judges.own(folder, verdict)
    judges.ask(list(judges.questions(folder, verdict, engine=False)), verdict)
    text = "\n".join(verdict.wrong)
    for part in ("train_batch_size", "torchrun: {'error'", "do not fit in", "the worst rank's terms"):
        assert part in text
