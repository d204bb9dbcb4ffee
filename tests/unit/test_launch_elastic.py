"""Planning anew for other nodes: which hosts, which plan, which checkpoints, and files that survive a crash."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dslaunch.flow import Request, rendered
from dslaunch.launch.elastic import Fleet
from dslaunch.launch.reload import conversion_fault, reload_fault
from dslaunch.launch.replan import NoPlanError, replan
from dslaunch.launch.universal import MODE, conversion_of
from dslaunch.planfile import Plan, ProgramPlan, plan_from_json
from dslaunch.planfile.plan import Setting
from dslaunch.render.blueprint import BLUEPRINT, read_blueprint
from dslaunch.run.folder import verify, write_files
from dslaunch.run.generations import begin_generation, complete, first_files, generation_of
from tests.command import CommandLine
from tests.launching import make_plan

RUNTIME = "dslaunch.runtime"
_WORDS = (
    "recipe=vla_tiny", "cluster=3x2xA100", "launcher=ssh", "cluster.hosts=[a,b,c]", "restart.elastic=true",
    "training.micro_batch=2", "training.global_batch=24",
)  # fmt: skip


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return rendered(Request(_WORDS, None, (), ()))[2]


def _replanned(
    files: dict[str, str], most: int, least: int, hosts: tuple[str, ...] = (), *, saved: bool = False
) -> Any:
    plan = plan_from_json(files["plan.json"])
    return replan(read_blueprint(files[BLUEPRINT], "here"), plan, most, least, hosts, Path(), zero_saved=saved)


@pytest.mark.parametrize(
    ("silent", "unfit", "suspect", "usable"),
    [
        ((), (), "", "a= b=0,1 c= d="),
        (("b",), (), "", "a= c= d="),
        ((), ("a",), "", "b=0,1 c= d="),
        ((), (), "b", "a= c= d= b=0,1"),
    ],
)
def test_hosts_that_answer_are_used_and_the_suspect_last(
    silent: tuple[str, ...], unfit: tuple[str, ...], suspect: str, usable: str
) -> None:
    fleet = Fleet(("a=", "b=0,1", "c=", "d="), wanted=3)
    assert fleet.usable(silent, unfit, suspect) == tuple(usable.split())


def test_a_plan_for_fewer_nodes_keeps_batch_rate_and_engine(files: dict[str, str]) -> None:
    before = plan_from_json(files["plan.json"])
    made = _replanned(files, 2, 1, ("a", "c"))
    assert made.plan.cluster.hosts == ("a", "c")
    assert (made.plan.world_size, made.plan.global_batch) == (4, 24)
    assert made.plan.training == before.training
    assert made.plan.engine == before.engine
    assert made.files["hostfile"].split() == ["a", "slots=2", "c", "slots=2"]
    assert made.files[BLUEPRINT] == files[BLUEPRINT]


def test_the_largest_number_of_nodes_that_divides_the_batch_is_taken() -> None:
    words = (*_WORDS, "training.global_batch=18", "training.micro_batch=3")
    made = _replanned(rendered(Request(words, None, (), ()))[2], 2, 1, ("a", "b"))
    assert made.plan.cluster.nodes == 1
    assert made.plan.cluster.hosts == ("a",)
    assert made.refused[0].startswith("2 nodes, strategy zero1: training.micro_batch is 3: global_batch 18")
    with pytest.raises(NoPlanError, match="2 nodes, strategy zero1"):
        _replanned(rendered(Request(words, None, (), ()))[2], 2, 2, ("a", "b"))


@pytest.mark.slow
def test_a_recipes_own_layouts_give_way_to_a_search_under_the_same_engine() -> None:
    words = ("recipe=vla70b", "cluster=64xA100", "launcher=slurm", "restart.elastic=true")
    made = _replanned(rendered(Request(words, None, (), ()))[2], 4, 4)
    assert (made.plan.strategy, made.plan.engine.name) == ("auto", "native")
    assert made.plan.world_size == 32
    assert "strategy layouts" in made.refused[0]


def _plan(engine: str, dp: int, zero: int, *, module: str = "", tp: int = 1, **extra: Any) -> Plan:
    plan = make_plan(1, 8, engine=engine)
    (name, component), *_ = plan.components.items()
    resized = dataclasses.replace(component, dp=dp, zero=zero, tp=tp)
    program = ProgramPlan(module=module) if module else plan.program
    given = {key.replace("_", "-"): value for key, value in extra.items()}
    changed = dataclasses.replace(plan.engine, extra=given)
    return dataclasses.replace(plan, components={name: resized}, program=program, engine=changed)


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        (_plan("deepspeed", 4, 3, module=RUNTIME), _plan("deepspeed", 2, 3, module=RUNTIME), ""),
        (_plan("deepspeed", 4, 1), _plan("deepspeed", 4, 1), ""),
        (_plan("deepspeed", 4, 0), _plan("deepspeed", 2, 0), ""),
        (_plan("deepspeed", 4, 1), _plan("deepspeed", 2, 1), "ZeRO-1 is read by as many ranks, of the same stage"),
        (_plan("deepspeed", 4, 0), _plan("deepspeed", 2, 1), "of the same stage, as saved it"),
        (_plan("torch", 4, 3), _plan("torch", 2, 3), ""),
        (_plan("megatron", 4, 1), _plan("megatron", 2, 1), ""),
        (_plan("megatron", 4, 1, tp=2), _plan("megatron", 4, 1, tp=1), "the tp, pp, cp and ep that saved it"),
        (_plan("megatron", 4, 1), _plan("megatron", 2, 1, ckpt_format="torch"), "it is torch"),
        (_plan("megatron_deepspeed", 4, 1), _plan("megatron_deepspeed", 2, 1), "under its own layout only"),
    ],
)
def test_a_plan_whose_program_cannot_read_the_checkpoint_is_refused(before: Plan, after: Plan, fault: str) -> None:
    found = reload_fault(before, after)
    assert fault in found
    assert bool(found) == bool(fault)


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        (_plan("deepspeed", 4, 1), _plan("deepspeed", 2, 1), ""),
        (_plan("deepspeed", 4, 1), _plan("deepspeed", 2, 2), ""),
        (_plan("deepspeed", 2, 3), _plan("deepspeed", 4, 3), ""),
        (_plan("deepspeed", 4, 2), _plan("deepspeed", 2, 3), "not 2 into 3"),
        (_plan("deepspeed", 4, 0), _plan("deepspeed", 2, 1), "not 0 into 1"),
        (_plan("deepspeed", 4, 1, tp=2), _plan("deepspeed", 2, 1, tp=2), "other replicas alone"),
        (_plan("deepspeed", 4, 1, optimizer={"type": "Lion"}), _plan("deepspeed", 2, 1), "the optimizer is Lion"),
        (_plan("torch", 4, 3), _plan("torch", 2, 3), "no checkpoint that a script of DeepSpeed saved"),
    ],
)
def test_what_deepspeed_cannot_convert_is_said(before: Plan, after: Plan, fault: str) -> None:
    found = conversion_fault(before, after)
    assert fault in found
    assert bool(found) == bool(fault)


_SCRIPT = (*_WORDS, "engine=deepspeed", "strategy=zero2", "module=", "script=train.py")


@pytest.mark.parametrize("saved", [True, False])
def test_a_scripts_zero_checkpoint_is_read_once_it_is_converted(*, saved: bool) -> None:
    """Before the first one is saved there is nothing that the configuration could ask for."""
    made = _replanned(rendered(Request(_SCRIPT, None, (), ()))[2], 2, 2, ("a", "b"), saved=saved)
    assert made.plan.world_size == 4
    wanted = {"load_universal": True} if saved else None
    assert json.loads(made.files["ds_config.json"]).get("checkpoint") == wanted
    assert (MODE in made.plan.engine.modes) == saved


def test_a_container_is_no_place_to_convert_in() -> None:
    words = (*_SCRIPT, "launcher=slurm", "launcher.container.kind=pyxis", "launcher.container.image=i")
    with pytest.raises(NoPlanError, match="runs outside of the container"):
        _replanned(rendered(Request(words, None, (), ()))[2], 2, 2, saved=True)


def _saved(folder: Path, *ranks: int) -> None:
    folder.mkdir(parents=True)
    (folder / "mp_rank_00_model_states.pt").touch()
    for rank in ranks:
        (folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    (folder.parent / "latest").write_text(folder.name)


def test_the_newest_checkpoint_is_converted_once(tmp_path: Path) -> None:
    modes = {MODE: dict[str, Setting]()}
    plan = make_plan(1, 8, engine="deepspeed")
    universal = dataclasses.replace(plan, engine=dataclasses.replace(plan.engine, modes=modes))
    assert conversion_of(universal, tmp_path, "") is None
    checkpoints = tmp_path / "checkpoints"
    _saved(checkpoints / "global_step4", 0, 1)
    assert conversion_of(plan, tmp_path, "") is None
    wanted = conversion_of(universal, tmp_path, "")
    assert wanted is not None
    assert (wanted.source.name, wanted.target.name) == ("global_step4", "global_step4_universal")
    wanted.target.mkdir()
    assert conversion_of(universal, tmp_path, "") == wanted, "it was cut short"
    (checkpoints / "latest_universal").write_text(wanted.target.name)
    assert conversion_of(universal, tmp_path, "") is None


def test_the_trainers_folder_of_a_step_holds_deepspeeds(tmp_path: Path) -> None:
    modes = {MODE: dict[str, Setting]()}
    plan = make_plan(1, 8, engine="deepspeed")
    universal = dataclasses.replace(plan, engine=dataclasses.replace(plan.engine, modes=modes))
    _saved(tmp_path / "checkpoints" / "checkpoint-6" / "global_step6", 0, 1)
    wanted = conversion_of(universal, tmp_path, "")
    assert wanted is not None
    assert wanted.target == tmp_path / "checkpoints" / "checkpoint-6" / "global_step6_universal"


def test_every_generation_is_kept_and_a_crash_between_files_is_made_good(
    tmp_path: Path, files: dict[str, str]
) -> None:
    write_files(tmp_path, files)
    made = _replanned(files, 2, 1, ("a", "c"))
    assert begin_generation(tmp_path, made.files) == 2
    assert verify(tmp_path) == made.files
    assert first_files(tmp_path) == files
    write_files(tmp_path, {name: files[name] for name in ("manifest.json", "plan.json")})
    complete(tmp_path)
    assert verify(tmp_path) == made.files
    assert generation_of(tmp_path) == 2


def test_where_a_run_cannot_move_elastic_is_refused(dslaunch: CommandLine) -> None:
    done = dslaunch("recipe=vla_tiny", "restart.elastic=true", "--dry-run")
    assert done.status == 2
    assert "restart.elastic: true, and launcher=local does not start a run on other hosts" in done.err


def test_fewest_nodes_without_elastic_are_read_by_nobody(dslaunch: CommandLine) -> None:
    done = dslaunch("plan", "recipe=vla_tiny", "restart.min_nodes=2")
    assert done.status == 2
    assert "set elastic to true" in done.err


def test_the_plans_page_says_that_it_is_elastic(dslaunch: CommandLine) -> None:
    done = dslaunch("plan", *_WORDS, "restart.min_nodes=2")
    assert "planned anew where hosts are lost, for 2 of 3 nodes at least" in done.out
