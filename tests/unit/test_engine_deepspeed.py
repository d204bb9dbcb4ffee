"""DeepSpeed's modes in the plan and in its JSON: what is rendered, what is refused, and what it takes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dslaunch.engines.deepspeed_keys import table
from dslaunch.engines.registry import ENGINES
from dslaunch.errors import ConfigError, PlanError
from dslaunch.planfile import Prediction
from tests.golden.cases import planned, rendered

LLAMA = ["recipe=llama3_8b", "cluster=64xA100", "engine=deepspeed", "script=train.py"]
NVME = ["strategy=zero3_nvme_offload", "strategy.nvme.path=/nvme/run"]
ZENFLOW = ["strategy=zenflow", "training.global_batch=64"]


def config(*words: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(rendered(*LLAMA, *words)["ds_config.json"])
    return made


def refusal(*words: str) -> str:
    with pytest.raises(PlanError) as caught:
        planned(*LLAMA, *words)
    return str(caught.value)


def prediction(*words: str) -> Prediction:
    return planned(*LLAMA, *words)[1]


def said(found: Prediction, rule: str) -> str:
    return next(each.message for each in found.findings if each.rule == rule)


def test_zero_plus_plus_takes_a_node() -> None:
    zero = config("strategy=zero3_plus_plus")["zero_optimization"]
    assert zero["zero_hpz_partition_size"] == 8
    assert zero["zero_quantized_weights"] is zero["zero_quantized_gradients"] is True
    alone = config("strategy=zero3_hpz", "strategy.zero_plus_plus.hpz=4")["zero_optimization"]
    assert alone["zero_hpz_partition_size"] == 4
    assert "zero_quantized_weights" not in alone


def test_the_second_partition_is_in_the_ledger() -> None:
    """Llama 3 8B has 8.03e9 parameters: 2 bytes of each over 8 ranks are 1.87 GiB."""
    without, with_hpz = prediction("strategy=zero3"), prediction("strategy=zero3_hpz")
    assert with_hpz.peak_memory_gib - without.peak_memory_gib == pytest.approx(1.87, abs=0.01)
    host = [prediction("strategy=zero3_cpu_offload", f"strategy.zero_plus_plus.hpz={n}") for n in (1, 8)]
    assert host[1].host_memory_gib - host[0].host_memory_gib == pytest.approx(8 * 1.87, abs=0.1)
    assert host[1].peak_memory_gib == host[0].peak_memory_gib


def test_less_traffic_between_nodes_takes_less_time() -> None:
    words = ["strategy=zero3", "training.overlap_comm=false"]
    plain = prediction(*words).step_time_s
    hpz = prediction(*words, "strategy.zero_plus_plus.hpz=node").step_time_s
    everything = prediction(
        *words, "strategy.zero_plus_plus={hpz: node, quantized_weights: true, quantized_gradients: true}"
    ).step_time_s
    assert everything < hpz < plain


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy=zero2", "strategy.zero_plus_plus.hpz=8"], "at ZeRO-3 only"),
        (["strategy=zero3_hpz", "strategy.zero_plus_plus.hpz=16"], "allowed: 2, 4, 8, or node"),
        (["strategy=zero3_hpz", "strategy.zero_plus_plus.hpz=3"], "groups of 3 ranks do not fill the 8 GPUs"),
        (["strategy=ulysses", "strategy.zero_plus_plus.hpz=8"], "consecutive ranks"),
        ([NVME[0]], "strategy.nvme.path is empty"),
        ([*NVME, "cluster.node.nvme_gib=0"], "the nodes have no NVMe"),
        ([*NVME, "cluster.node.nvme_gb_per_s=0"], "nvme_gb_per_s is 0"),
        ([*NVME, "strategy.every.zero=2"], "below ZeRO-3 DeepSpeed puts the states in host memory"),
        ([*NVME, "strategy.zero_plus_plus.hpz=8"], "cannot be kept on NVMe"),
        (["strategy=zenflow"], "num_microbatches must be 1, not 2. Set training.micro_batch=2"),
        ([*ZENFLOW, "strategy.every.offload=none"], "needs strategy.llm.offload=cpu"),
        ([*ZENFLOW, "strategy.zenflow.select_interval=2"], "less than update_interval 4"),
        (["strategy=super_offload", "strategy.every.zero=2"], "needs strategy.llm.zero=3"),
        (["strategy=autotp", "strategy.every.cp=2"], "set one of them to 1"),
        (["strategy=ulysses", "strategy.every.cp=64"], "32 / 64 = 0.5 is not whole"),
        (["strategy=ulysses", "training.seq_len=4100"], "4100 / 8 = 512.5 is not whole"),
        (
            ["strategy=zero3", "engine.activation_checkpointing={enabled: true, contiguous: true}"],
            "needs partition_activations=true and number",
        ),
    ],
)
def test_a_mode_that_deepspeed_cannot_do_is_refused(words: list[str], message: str) -> None:
    assert message in refusal(*words).replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "version", "message"),
    [
        (["strategy=super_offload"], "0.17.6", "offload_optimizer.super_offload since 0.18.0"),
        (ZENFLOW, "0.17.4", "zero_optimization.zenflow since 0.17.5"),
        ([*ZENFLOW, "strategy.every.zero=3"], "0.18.0", "came with DeepSpeed 0.18.1"),
        (["strategy=autotp", "strategy.every.zero=3"], "0.19.3", "Set engine.version=0.19.4 or newer"),
    ],
)
def test_what_is_new_is_not_offered_to_the_old(words: list[str], version: str, message: str) -> None:
    assert message in refusal(*words, f"engine.version={version}")
    assert config(*words)


def test_an_unknown_version_is_answered_with_the_list() -> None:
    with pytest.raises(ConfigError) as caught:
        planned(*LLAMA, *ZENFLOW, "strategy.every.zero=3", "engine.version=new")
    message = str(caught.value)
    assert "engine.version is new" in message
    assert "0.19.8, 0.19.7" in message
    assert "0.16.9" in message


def test_the_engine_renders_for_each_version_of_the_table() -> None:
    assert ENGINES["deepspeed"].versions == tuple(reversed(table().versions))
    assert {json.dumps(config("strategy=zero3", f"engine.version={v}")) for v in table().versions} == {
        json.dumps(config("strategy=zero3"))
    }


def test_defaults_that_changed_are_written_out() -> None:
    """gradient_clipping and check_grad_overflow changed with 0.19.3, pin_memory with 0.19.5."""
    made = config("strategy=zero3_cpu_offload", "training.clip=0")
    assert made["gradient_clipping"] == 0.0
    assert made["bf16"]["check_grad_overflow"] is True
    assert made["zero_optimization"]["offload_optimizer"]["pin_memory"] is True


def test_nvme_has_its_files_and_its_buffers() -> None:
    made = config(*NVME, "strategy.nvme={block_size: 524288, queue_depth: 16, threads: 4}")
    zero = made["zero_optimization"]
    assert zero["offload_optimizer"]["nvme_path"] == zero["offload_param"]["nvme_path"] == "/nvme/run"
    assert zero["sub_group_size"] == 100_000_000
    assert made["aio"] == {
        "block_size": 524288, "queue_depth": 16, "intra_op_parallelism": 4, "single_submit": False,
        "overlap_events": True,
    }  # fmt: skip
    states_only = config(*NVME, "strategy.every.offload=nvme")["zero_optimization"]
    assert "offload_param" not in states_only


def test_a_buffer_holds_the_largest_parameters_piece() -> None:
    """The vocabulary's table of 128256 x 4096 over 2 ranks is 262,668,288 elements."""
    made = config(*NVME, "cluster=2xA100", "cluster.node.host_memory_gib=4000", "strategy.every.recompute=full")
    assert made["zero_optimization"]["offload_param"]["buffer_size"] == 128256 * 4096 // 2


def test_the_ledger_counts_nvme_and_its_time() -> None:
    """18 bytes of 8.03e9 parameters are 135 GiB."""
    nvme = prediction(*NVME, "cluster=8xA100")
    cpu = prediction("strategy=zero3_cpu_offload", "cluster=8xA100")
    assert "a node keeps 135 of " in said(nvme, "memory.nvme")
    assert nvme.host_memory_gib < cpu.host_memory_gib
    assert nvme.step_time_s > cpu.step_time_s


def test_nvme_that_is_too_small_stops_the_plan() -> None:
    found = prediction(*NVME, "cluster.node.nvme_gib=10")
    finding = next(each for each in found.findings if each.rule == "memory.nvme")
    assert finding.severity == "error"
    assert "does not fit: a node keeps 17 of 10 GiB" in finding.message


def test_autotp_leaves_the_batch_to_deepspeed_and_says_so() -> None:
    made = config("strategy=autotp")
    assert made["tensor_parallel"] == {"autotp_size": 8}
    assert "train_batch_size" not in made
    assert (made["train_micro_batch_size_per_gpu"], made["gradient_accumulation_steps"]) == (1, 16)
    assert "must all get the same samples" in said(prediction("strategy=autotp"), "autotp.script")


def test_ulysses_names_its_mesh() -> None:
    made = config("strategy=ulysses")
    assert (made["sequence_parallel_size"], made["data_parallel_size"], made["train_batch_size"]) == (8, 8, 128)
    assert "8 ranks share each sequence" in said(prediction("strategy=ulysses"), "ulysses.script")


def test_degrees_above_one_are_deepspeeds_by_name_alone() -> None:
    plan, _, _ = planned("recipe=llama3_8b", "cluster=64xA100", "strategy=autotp")
    assert plan.engine.name == "megatron"
    assert "deepspeed" not in plan.engines


def test_zenflow_and_super_offload() -> None:
    zenflow = config(*ZENFLOW, "strategy.zenflow.topk_ratio=0.05")["zero_optimization"]["zenflow"]
    assert (zenflow["topk_ratio"], zenflow["select_strategy"], zenflow["update_interval"]) == (0.05, "step", 4)
    moved = config("strategy=super_offload", "strategy.super_offload.cpu_cores=0.5")["zero_optimization"]
    assert moved["offload_optimizer"] == {
        "device": "cpu", "pin_memory": True, "super_offload": True, "cpuadam_cores_perc": 0.5,
    }  # fmt: skip


def test_super_offload_is_for_gpus_of_either_maker() -> None:
    """PyTorch's device type is "cuda" on AMD's GPUs too, and that is what DeepSpeed asserts."""
    words = ["strategy=super_offload", "engine=deepspeed"]
    made = config(*words, "cluster=64xMI300X")
    assert made["zero_optimization"]["offload_optimizer"]["super_offload"] is True
    with pytest.raises(PlanError, match=r"runs on GPUs alone; the cluster has CPUs"):
        planned("recipe=vla_tiny", "cluster=local", *words)


def test_sections_on_request() -> None:
    made = config(
        "strategy=zero3", "checkpoint.universal=true",
        "engine.activation_checkpointing={enabled: true, cpu: true}",
        "engine.monitor.tensorboard={enabled: true, path: logs}", "engine.monitor.csv.enabled=true",
        "engine.monitor.wandb={enabled: true, team: vla}", "engine.monitor.comet={enabled: true, project: p}",
        "engine.extra.flops_profiler.enabled=true", "engine.extra.comms_logger.enabled=true",
    )  # fmt: skip
    assert made["checkpoint"] == {"load_universal": True}
    assert made["activation_checkpointing"]["cpu_checkpointing"] is True
    assert made["tensorboard"] == {"enabled": True, "output_path": "logs", "job_name": "llama3_8b"}
    assert made["csv_monitor"] == {"enabled": True, "output_path": "", "job_name": "llama3_8b"}
    assert made["wandb"] == {"enabled": True, "project": "llama3_8b", "team": "vla"}
    assert made["comet"] == {"enabled": True, "project": "p", "samples_log_interval": 100}
    assert made["flops_profiler"] == made["comms_logger"] == {"enabled": True}
    assert not set(config("strategy=zero3")) & {"checkpoint", "tensorboard", "wandb", "activation_checkpointing"}


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("torch", ["strategy=fsdp2", "strategy.zero_plus_plus.hpz=8"]),
        ("torch", ["strategy=fsdp2", "engine.huggingface=true"]),
        ("megatron", ["strategy=zero1", "strategy.llm.tp=8", "checkpoint.universal=true"]),
    ],
)
def test_an_engine_that_would_leave_a_mode_out_is_refused(engine: str, words: list[str]) -> None:
    with pytest.raises(PlanError, match=f"is DeepSpeed's; {engine} does not have it"):
        planned("recipe=llama3_8b", "cluster=64xA100", f"engine={engine}", *words)


def test_hugging_face_fills_in_what_its_arguments_say() -> None:
    files = rendered(*LLAMA, "strategy=zero3", "engine.huggingface=true", "training.optimizer.min_lr=1e-6")
    made, arguments = json.loads(files["ds_config.json"]), json.loads(files["hf_args.json"])
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert {made[key] for key in batch} == {"auto"} == set(made["optimizer"]["params"].values())
    assert made["bf16"] == {"enabled": "auto", "check_grad_overflow": True}
    assert made["zero_optimization"]["reduce_bucket_size"] == 200_000_000
    assert "scheduler" not in made
    assert (arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]) == (1, 2)
    assert arguments["lr_scheduler_type"] == "cosine_with_min_lr"
    assert "hf_args.json" not in rendered(*LLAMA, "strategy=zero3")


def test_hugging_face_cannot_end_a_linear_schedule_above_zero() -> None:
    words = ["strategy=zero3", "engine.huggingface=true", "training.optimizer.schedule=linear"]
    with pytest.raises(ConfigError, match="linear schedule ends at 0"):
        rendered(*LLAMA, *words, "training.optimizer.min_lr=1e-6")
