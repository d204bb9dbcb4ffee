"""engine.extra: laid over what is planned, checked against the framework's own keys."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dslaunch.engines.deepspeed_keys import newest
from dslaunch.engines.megatron_catalogue import megatron_catalogue
from dslaunch.errors import ConfigError
from dslaunch.render.extra import merge_deepspeed
from dslaunch.render.megatron_flags import merge_extra
from tests.golden.cases import rendered

BASE: dict[str, Any] = {
    "train_batch_size": 8,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
}


def merged_with(config: dict[str, Any], extra: dict[str, Any], version: str = newest()) -> dict[str, Any]:
    return merge_deepspeed(config, extra, version)


def refusal(extra: dict[str, Any], version: str = newest()) -> str:
    with pytest.raises(ConfigError) as caught:
        merged_with(BASE, extra, version)
    return str(caught.value)


def test_sections_are_merged_and_the_rest_kept() -> None:
    merged = merged_with(
        BASE,
        {
            "zero_optimization": {"round_robin_gradients": True, "offload_optimizer": {"ratio": 0.5}},
            "comms_logger": {"enabled": True},
        },
    )
    assert merged["zero_optimization"] == {
        "stage": 2,
        "round_robin_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.5},
    }
    assert merged["comms_logger"] == {"enabled": True}
    assert BASE["zero_optimization"].keys() == {"stage", "offload_optimizer"}


def test_an_alias_is_written_under_the_name_that_stands_already() -> None:
    merged = merged_with(
        {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1}},
        {"zero_optimization": {"prefetch_bucket_size": 7}},
    )
    assert merged["zero_optimization"] == {"stage": 3, "stage3_prefetch_bucket_size": 7}


@pytest.mark.parametrize(
    ("extra", "key", "fate", "near"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation", "silently ignore", "zero_optimization"),
        ({"bf16": {"enable": True}}, "bf16.enable", "reject", "enabled"),
        ({"zero_optimization": {"sub_group": 1}}, "zero_optimization.sub_group", "reject", "sub_group_size"),
        ({"aio": {"queue_dept": 8}}, "aio.queue_dept", "silently ignore", "queue_depth"),
        ({"timers": {"throughput": {"enable": True}}}, "timers.throughput.enable", "reject", "enabled"),
    ],
)
def test_an_unknown_key_says_what_deepspeed_would_do(
    extra: dict[str, Any], key: str, fate: str, near: str
) -> None:
    message = refusal(extra)
    assert f"engine.extra.{key}:" in message
    assert fate in message
    assert f"Did you mean '{near}'?" in message


def test_a_removed_key_is_refused_since_it_was_removed() -> None:
    message = refusal({"elasticity": {"enabled": True}})
    assert "removed in DeepSpeed 0.19.8" in message
    assert "Use the three batch keys instead, or set engine.version=0.19.7" in message
    mics = {"zero_optimization": {"mics_shard_size": 4}}
    assert "removed in DeepSpeed 0.19.7" in refusal(mics)
    assert merged_with(BASE, mics, "0.19.6")["zero_optimization"]["mics_shard_size"] == 4


def test_a_new_key_is_refused_before_it_came() -> None:
    extra = {"zero_optimization": {"leaf_module": {"names": ["experts"]}}}
    message = refusal(extra, "0.17.6")
    assert "zero_optimization.leaf_module: came with DeepSpeed 0.18.0; engine.version is 0.17.6" in message
    assert merged_with(BASE, extra, "0.18.0")["zero_optimization"]["leaf_module"] == {"names": ["experts"]}


def test_a_section_ignored_what_it_rejects_now() -> None:
    assert "silently ignore" in refusal({"bf16": {"enable": True}}, "0.17.0")
    assert "reject" in refusal({"bf16": {"enable": True}}, "0.17.1")


def test_what_an_optimizer_takes_is_laid_over_its_parameters() -> None:
    base = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    merged = merged_with(base, {"optimizer": {"params": {"torch_adam": True}}})
    assert merged["optimizer"] == {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


@pytest.mark.parametrize(
    ("extra", "decider"),
    [
        ({"train_batch_size": 4}, "training.global_batch"),
        ({"zero_optimization": {"stage": 3}}, "strategy.COMPONENT.zero"),
        ({"optimizer": {"params": {"lr": 1.0}}}, "training.optimizer.lr"),
        ({"scheduler": {"type": "OneCycle"}}, "training.optimizer.schedule"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "strategy.zero_plus_plus.hpz"),
        ({"zero_optimization": {"offload_optimizer": {"nvme_path": "/x"}}}, "strategy.nvme.path"),
        ({"tensor_parallel": {"autotp_size": 2}}, "strategy.COMPONENT.tp"),
    ],
)
def test_what_the_plan_decides_is_not_overruled(extra: dict[str, Any], decider: str) -> None:
    assert f"Set {decider} instead" in refusal(extra)


def test_a_section_given_as_a_value_is_refused() -> None:
    assert "a section with keys of its own" in refusal({"zero_optimization": True})


def test_every_section_of_the_catalogue_is_reachable() -> None:
    extra = {"tensorboard": {"enabled": True}, "pipeline": {"partition": "uniform"}, "dump_state": True}
    assert merged_with({}, extra) == extra


def test_megatron_flags_by_name_with_their_values() -> None:
    merged = merge_extra(
        {"--log-interval": ("1",)},
        {"log-params-norm": True, "log-interval": 5, "offload-modules": ["attn", "mlp"], "wandb-project": "a b"},
        megatron_catalogue("0.16.0"),
    )
    assert merged == {
        "--log-interval": ("5",),
        "--log-params-norm": (),
        "--offload-modules": ("attn", "mlp"),
        "--wandb-project": ("'a b'",),
    }


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"log-parms-norm": True}, "Did you mean 'log-params-norm'?"),
        ({"micro-batch-size": 4}, "Set training.micro_batch instead"),
        ({"log-params-norm": False}, "takes no value"),
        ({"timing-log-level": 7}, "allowed are 0, 1, 2"),
        ({"exit-interval": "soon"}, "a number of type int"),
        ({"exit-interval": [1, 2]}, "takes 1 value"),
        ({"wandb-project": "a\nb"}, "one line of text"),
    ],
)
def test_a_megatron_flag_that_its_parser_would_refuse(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.extra") as caught:
        merge_extra({}, extra, megatron_catalogue("0.16.0"))
    assert message in str(caught.value)


def test_it_reaches_the_rendered_file() -> None:
    text = rendered("recipe=vla_tiny", "cluster=local", "engine.extra.comms_logger.enabled=true")["ds_config.json"]
    assert json.loads(text)["comms_logger"] == {"enabled": True}


def test_an_engine_without_a_file_for_it_refuses_it() -> None:
    with pytest.raises(ConfigError, match=r"engine\.extra\.comms_logger: engine torch"):
        rendered("recipe=vla_tiny", "cluster=local", "strategy=ddp", "engine.extra.comms_logger.enabled=true")
