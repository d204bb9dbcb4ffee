"""Values arrive as typed, sizes of clusters are read as written, and a site's files go first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from dslaunch.compose import compose
from dslaunch.conffiles import GROUPS, names
from dslaunch.paths import data_root
from dslaunch.review.keys import sections
from dslaunch.schema.validate import validate
from tests.command import RECIPE, CommandLine, make_site


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("env.NCCL_IB_HCA", "mlx5_0,mlx5_1"),
        ("env.NCCL_SOCKET_IFNAME", "^lo"),
        ("env.A", "x=y"),
        ("env.EMPTY", ""),
        ("env.SPACES", "  two  spaces "),
        ("env.QUOTES", """it's "quoted" \\' \\\\"""),
        ("env.BACKSLASH", "C:\\dir\\"),
        ("env.DOLLAR", "$HOME ; echo `x`"),
        ("env.NEWLINE", "a\nb"),
        ("env.UNICODE", "größe 模型"),
        ("env.NUMBER", "0123"),
        ("env.BOOL", "true"),
        ("env.NULL", "null"),
        ("env.LIST", "[1, 2]"),
        ("launcher.slurm.exclude", "n[1-2]"),
        ("launcher.slurm.time", "12:00:00"),
        ("launcher.slurm.account", "0123"),
        ("script", "dir with 'quote/train.py"),
    ],
)
def test_text_arrives_as_typed(key: str, value: str) -> None:
    composed = compose("vla_tiny", [f"{key}={value}"])
    found: object = validate(composed.tree, composed.locate).model_dump()
    for part in key.split("."):
        assert isinstance(found, dict)
        found = found[part]
    assert found == value


@pytest.mark.parametrize(
    "typed",
    [
        ["training.global_batch=256", "training.global_batch=512"],
        ["strategy.llm.tp=4", "strategy.every.recompute=full"],
        ["cluster.hosts=[a,b]", "cluster.hosts=[c]"],
        ["training.optimizer={lr: 1e-4, betas: [0.9, 0.98]}", "training.optimizer.lr=3e-5"],
        ["layouts.64.llm={tp: 4}", "layouts.512={llm: {tp: 2}}"],
        ["training.clip=null", "training.seed=0x10"],
        ["model=llama3_8b", "cluster=64xA100", "model.components.llm.layers=2", "goal=cost"],
        ["nosuch.key.at.all=[1, {a: b}]"],
    ],
)
def test_single_keys_are_set_as_hydra_sets_them(typed: list[str]) -> None:
    tree = compose("vla70b", typed).tree
    root = data_root()
    words = [word if word.split("=")[0] in GROUPS else f"++{word}" for word in typed]
    with initialize_config_dir(config_dir=str(root / "recipes"), version_base="1.3"):
        found = hydra_compose("vla70b", [f"hydra.searchpath=['file://{root}/conf','sized://any']", *words])
    ours = {key: value for key, value in tree.items() if key not in ("recipe", "fabrics")}
    assert ours == OmegaConf.to_container(found, resolve=True)


def test_a_file_of_the_site_is_read_again_once_it_changed(tmp_path: Path) -> None:
    site = make_site(tmp_path / "site", RECIPE)
    before = compose("mine", [], site).tree["training"]["global_batch"]
    (site / "recipes" / "mine.yaml").write_text(RECIPE.replace("global_batch: 64", "global_batch: 32"))
    after = compose("mine", [], site).tree["training"]["global_batch"]
    assert (before, after) == (64, 32)


@pytest.mark.parametrize(
    ("typed", "nodes", "slots", "gpu"),
    [
        ("64xA100", 8, 8, "A100-SXM4-80GB"),
        ("8x8xA100", 8, 8, "A100-SXM4-80GB"),
        ("64xA100-40GB", 8, 8, "A100-SXM4-40GB"),
        ("2x4xH100", 2, 4, "H100-SXM5-80GB"),
        ("6xA100", 1, 6, "A100-SXM4-80GB"),
        ("1xV100", 1, 1, "V100-SXM2-32GB"),
        ("local", 1, 2, "CPU"),
    ],
)
def test_cluster_sizes(typed: str, nodes: int, slots: int, gpu: str) -> None:
    composed = compose("vla_tiny", [f"cluster={typed}"])
    cluster = validate(composed.tree, composed.locate).cluster
    assert (cluster.node_count, cluster.slots, cluster.gpu.name) == (nodes, slots, gpu)
    assert cluster.world_size == nodes * slots


def test_a_sites_recipe_cluster_and_shadowing(dslaunch: CommandLine, tmp_path: Path) -> None:
    ours = "defaults:\n  - A100-80GB\n  - _self_\ngpu:\n  name: OURS\n"
    site = make_site(tmp_path / "a site's folder", RECIPE, ours=ours)
    ran = dslaunch("plan", "recipe=mine", "cluster=16xours", "--config-dir", str(site))
    assert ran.status == 0, ran.err
    assert "16 GPUs = 2 nodes x 8 OURS" in ran.out
    assert "mine" in names("recipes", site)
    assert "vla70b" in names("recipes", site)


def test_where_a_key_was_written() -> None:
    composed = compose("vla70b", ["training.steps=5", "cluster=64xH100"])
    assert composed.locate(["training", "steps"]) == "command line"
    assert composed.locate(["training", "seq_len"]).startswith("recipes/vla70b.yaml:")
    assert composed.locate(["training", "optimizer", "nothing"]).startswith("recipes/vla70b.yaml:")
    assert composed.locate(["cluster", "gpu", "memory_gib"]).startswith("conf/cluster/H100-80GB.yaml:") or (
        composed.locate(["cluster", "gpu", "memory_gib"]) == "command line"
    )


def test_options_and_overrides_in_any_order(dslaunch: CommandLine) -> None:
    first = dslaunch("plan recipe=vla70b cluster=64xA100 --json")
    assert first.status == 0
    assert first.out == dslaunch("--json cluster=64xA100 plan recipe=vla70b").out
    assert first.out == dslaunch("recipe=vla70b --json plan cluster=64xA100").out


def test_lists_and_schema(dslaunch: CommandLine) -> None:
    assert "vla_tiny" in dslaunch("recipes").out
    assert "70.6B" in dslaunch("models").out
    assert "A100-SXM4-80GB" in dslaunch("clusters").out
    assert "1234" in dslaunch("schema training.seed").out
    assert "strategy.llm.tp" in dslaunch("schema strategy.llm").out
    assert dslaunch("schema training.sede").status == 2
    assert "Did you mean 'training.seed'" in dslaunch("schema training.sede").err
    assert "Did you mean 'training.optimizer.lr'" in dslaunch("schema training.lr").err


def test_one_key_with_its_unit_default_and_source(dslaunch: CommandLine) -> None:
    assert dslaunch("schema training.micro_batch").out.splitlines() == [
        "training.micro_batch  int  1  Samples per replica and pass.",
        "# unit: samples",
        "# source: conf/training/base.yaml",
    ]
    rows = dslaunch("schema model.components.llm.layers").out.splitlines()
    assert [row.split()[:3] for row in rows] == [
        ["model.components.llm.layers", "int", "required"], ["#", "source:", "dslaunch/schema/components.py"],
    ]  # fmt: skip


def test_every_key_is_documented() -> None:
    def undocumented(section: str) -> Iterator[str]:
        for _, found in sections(section):
            for key in found:
                if not key.meaning:
                    yield key.key
                if "section" in key.type and key.key not in ("layouts", "fabrics"):
                    yield from undocumented(key.key if key.type == "section" else f"{key.key}.0")

    assert list(undocumented("")) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(dslaunch: CommandLine, shell: str) -> None:
    assert "_DSLAUNCH_COMPLETE" in dslaunch(f"completion {shell}").out
