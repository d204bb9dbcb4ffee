"""What Megatron's validation passes, and its scripts, its model or its data set refuse behind it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from dslaunch.files.fileset import FileSet
from dslaunch.files.flags import is_told
from dslaunch.planfile import Plan
from dslaunch.rules.megatron.demands import ARGUMENTS, CONFIG, RUN, Demand, demands
from dslaunch.rules.megatron.run import NotToldError, Run, runs, where_told
from dslaunch.rules.megatron.stages import BUILT
from dslaunch.rules.registry import Hit, rule
from dslaunch.rules.settings import Settings

_LAYERS, _FREQUENCY, _NO_ROPE = "--num-layers", "--moe-layer-freq", "--no-rope-freq"
_LAYOUT = "--pipeline-model-parallel-layout"
_LONGEST = 10_000
"""Layers of a pattern; no model has that many."""
_READ = "core_v0.12.3 to core_v0.19.0"


def pattern(run: Run, flag: str) -> list[int] | None:
    """The list that `([0]*3+[1]*57)` stands for; None where it is one number. Nothing is evaluated but + and *."""
    text = "".join(run.texts(flag))
    if "[" not in text:
        return None
    try:
        return _listed(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        raise NotToldError(flag) from None


def _listed(node: ast.expr) -> list[int]:
    if isinstance(node, ast.List):
        if all(isinstance(each, ast.Constant) and type(each.value) is int for each in node.elts):
            return [ast.literal_eval(each) for each in node.elts]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _listed(node.left) + _listed(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        part, times = (node.left, node.right) if isinstance(node.right, ast.Constant) else (node.right, node.left)
        one, count = _listed(part), times.value if isinstance(times, ast.Constant) else None
        if type(count) is int and 0 <= count * len(one) <= _LONGEST:
            return one * count
    raise ValueError(ast.dump(node))


def _misfits(run: Run, flag: str) -> bool:
    found = pattern(run, flag)
    return found is not None and len(found) != run.size(_LAYERS)


def _of_gpt(run: Run) -> bool:
    return run.experts > 0 and not run.on("--spec") and run.program in ("", "pretrain_gpt.py")


def _pattern_is_refused(run: Run) -> bool:
    return _of_gpt(run) and run.on(_FREQUENCY) and (
        _misfits(run, _FREQUENCY) or not set(pattern(run, _FREQUENCY) or ()) <= {0, 1}
    )  # fmt: skip


def _no_rope_is_refused(run: Run) -> bool:
    if not run.on(_NO_ROPE):
        return False
    if pattern(run, _NO_ROPE) is not None:
        return _misfits(run, _NO_ROPE)
    every = run.size(_NO_ROPE)
    return every > 0 and run.size(_LAYERS) % every > 0


def _unrolled(text: str) -> str:
    """A layout with `(tt|)*3` and `t*3` written out, as Megatron does it."""
    text = text.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text[:_LONGEST])
    return text


def _layout_is_refused(run: Run) -> bool:
    if not run.on(_LAYOUT):
        return False
    text = _unrolled(run.text(_LAYOUT))
    stages, letters = text.split("|"), text.replace("|", "")
    shape = letters[:1] == "E" and letters[-1:] == "L" and letters.count("E") == letters.count("L") == 1
    alike = set(letters) <= set("EtmL") and letters.count("m") == run.size("--mtp-num-layers", 0)
    return not (shape and alike) or letters.count("t") != run.size(_LAYERS) or len(stages) % run.pp > 0


_HYBRID = "--hybrid-override-pattern"


def _hybrid_is_refused(run: Run) -> bool:
    """megatron/core/ssm/mamba_hybrid_layer_allocation.py, which later versions let decide the number of layers."""
    if not run.arguments.has(_HYBRID) or run.program != "pretrain_mamba.py":
        return False
    kinds = run.text(_HYBRID)
    return len(kinds) != run.size(_LAYERS) or not set(kinds) <= set("M*-E")


demands(
    "megatron.layer-pattern",
    "A pattern of layers that isn't as long as the model, or holds other numbers than 0 and 1.",
    (
        Demand(
            _FREQUENCY, _pattern_is_refused,
            f"its pattern doesn't have a 0 or a 1 for each of --num-layers{BUILT}",
            "Write one entry for each layer, such as ([0]*3+[1]*58) for 61.",
        ),
        Demand(
            _NO_ROPE, _no_rope_is_refused, "its pattern isn't as long as --num-layers, or its number no divisor",
            "Write one entry for each layer, or a number that divides them.",
        ),
        Demand(
            "--linear-attention-freq",
            lambda r: r.on("--experimental-attention-variant") and r.on("--linear-attention-freq")
            and _misfits(r, "--linear-attention-freq"),
            f"its pattern isn't as long as --num-layers{BUILT}", "Write one entry for each layer.",
        ),
        Demand(
            _LAYOUT, _layout_is_refused,
            "it isn't E, a t for each of --num-layers, an m for each of --mtp-num-layers and L, in a multiple of "
            "the pipeline's stages", "Count the layers: Et*7|t*8|t*8|t*9L has 32 in 4 stages.",
        ),
        Demand(
            _HYBRID, _hybrid_is_refused,
            f"its pattern has other letters than M, *, - and E, or not one for each of --num-layers{BUILT}",
            "Write one letter for each layer.", before="0.17.0",
        ),
    ),
    evidence="NVIDIA/Megatron-LM:megatron/core/models/gpt/gpt_layer_specs.py get_gpt_decoder_layer_specs, "
    f"{CONFIG} at {_READ}; 0.16.1, run",
    stops="Megatron stops",
)  # fmt: skip


def _coefficient(run: Run) -> float:
    values = run.texts("--moe-aux-loss-coeff", ("0",))
    try:
        return max(float(each) for each in values)
    except ValueError:
        raise NotToldError("--moe-aux-loss-coeff") from None


demands(
    "megatron.model",
    "Settings that validation passes, and the model refuses when it is built or in its first step.",
    (
        Demand(
            "--moe-router-load-balancing-type",
            lambda r: r.experts > 0 and "sinkhorn" in r.texts("--moe-router-load-balancing-type", ("aux_loss",))
            and len(r.texts("--moe-router-load-balancing-type")) == 1 and _coefficient(r) != 0,
            "sinkhorn takes no auxiliary loss, and --moe-aux-loss-coeff isn't 0",
            "Write --moe-aux-loss-coeff 0, or balance by aux_loss.",
        ),
        Demand(
            "--moe-shared-expert-intermediate-size",
            lambda r: r.experts > 0 and r.on("--moe-shared-expert-intermediate-size")
            and not r.on("--disable-bias-linear") and r.expert_tp == 1,
            "shared experts have no biases", "Add --disable-bias-linear.", since="0.15.0",
        ),
        Demand(
            "--transformer-impl",
            lambda r: r.text("--transformer-impl", "transformer_engine") == "local" and r.cp > 1
            and not r.on("--spec"),
            "context parallelism with --transformer-impl local", "Use transformer_engine.",
        ),
    ),
    evidence="NVIDIA/Megatron-LM:megatron/core/transformer/moe/router.py sinkhorn_load_balancing, "
    f"moe/shared_experts.py, dot_product_attention.py at {_READ}; the last two 0.16.1, run",
    stops="AssertionError in the model",
)  # fmt: skip
_KERNELS = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_WANTED = {"flash": "100", "fused": "010", "unfused": "001", "local": "000", "auto": "111"}


def _other_kernel(run: Run) -> bool:
    """Whether a variable chooses another kernel of attention than --attention-backend does."""
    wanted = _WANTED.get(run.text("--attention-backend", "auto"))
    if wanted is None or run.on("--use-legacy-models") or "unset NVTE" in run.file.text:
        return False
    given = [run.environment(name) for name in _KERNELS]
    return any(value is not None and value != one for value, one in zip(given, wanted, strict=True))


demands(
    "megatron.attention-kernel", "NVTE_FLASH_ATTN and its like against --attention-backend.",
    (
        Demand(
            "--attention-backend", _other_kernel,
            "NVTE_FLASH_ATTN, NVTE_FUSED_ATTN or NVTE_UNFUSED_ATTN isn't what --attention-backend (auto by "
            "default: 1, 1 and 1) sets", "Take the variables out, and choose by --attention-backend.",
        ),
    ),
    evidence="NVIDIA/Megatron-LM:megatron/core/models/common/language_module/language_module.py "
    f"_set_attention_backend at {_READ}",
    stops="AssertionError when the model is built",
)  # fmt: skip
demands(
    "megatron.entry-script", "What another script than pretrain_gpt.py asks for.",
    (
        Demand(
            "--ckpt-format",
            lambda r: r.program == "pretrain_vlm.py" and r.text("--ckpt-format", "torch_dist") != "torch",
            "pretrain_vlm.py takes --ckpt-format torch alone, and torch_dist is the default",
            "Add --ckpt-format torch.",
        ),
        Demand(
            "--context-parallel-size",
            lambda r: r.program == "pretrain_vlm.py" and r.cp > 1 and r.pp > 1,
            "pretrain_vlm.py doesn't cut sequences and layers together", "Use one of the two.",
        ),
        Demand(
            "--pipeline-model-parallel-size", lambda r: r.program == "pretrain_t5.py" and r.pp > 1,
            "pretrain_t5.py has no pipeline", "Use --pipeline-model-parallel-size 1.", since="0.14.0",
        ),
        Demand(
            "--spec",
            lambda r: r.program == "pretrain_mamba.py" and not r.on("--spec")
            and r.text("--transformer-impl", "transformer_engine") != "inference_optimized",
            "pretrain_mamba.py without --spec",
            "Add --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec.", before="0.18.0",
        ),
    ),
    evidence="NVIDIA/Megatron-LM:pretrain_vlm.py, pretrain_t5.py, pretrain_mamba.py, mamba_builders.py at "
    f"{_READ}", stops="it stops while the model is built",
)  # fmt: skip


def _grown(run: Run) -> bool:
    return "expandable_segments:True" in (run.environment("PYTORCH_CUDA_ALLOC_CONF") or "")


demands(
    "megatron.allocator", "CUDA graphs beside PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
    (
        Demand(
            "--external-cuda-graph", lambda r: r.on("--external-cuda-graph") and _grown(r),
            "--external-cuda-graph with expandable_segments:True", "Take expandable_segments out.",
            since="0.14.0", before="0.15.0",
        ),
        Demand(
            "--cuda-graph-impl", lambda r: r.text("--cuda-graph-impl", "none") != "none" and _grown(r),
            "CUDA graphs with expandable_segments:True", "Take expandable_segments out.",
            since="0.15.0", before="0.16.0",
        ),
        Demand(
            "--cuda-graph-impl",
            lambda r: r.text("--cuda-graph-impl", "none") == "transformer_engine" and _grown(r)
            and r.environment("NCCL_GRAPH_REGISTER") != "0",
            "CUDA graphs of Transformer Engine with expandable_segments:True and no NCCL_GRAPH_REGISTER=0",
            "export NCCL_GRAPH_REGISTER=0.", since="0.16.0",
        ),
    ),
    evidence=f"{ARGUMENTS} at {RUN}",
)  # fmt: skip
_PATHS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")


@rule(
    "megatron.data-prefix", severity="error", raised_by="megatron", framework="megatron",
    evidence=f"NVIDIA/Megatron-LM:megatron/core/datasets/indexed_dataset.py at {_READ}; "
    "deepspeedai/Megatron-DeepSpeed, megatron/data/indexed_dataset.py at 4efb479",
)  # fmt: skip
def data_prefix(_plan: Plan | None, files: FileSet, settings: Settings) -> Iterator[Hit]:
    """A path of data that ends in .bin, .idx or .jsonl: Megatron takes the prefix of the first two."""
    for run in runs(files, settings):
        yield from where_told(_named_whole(run))


def _named_whole(run: Run) -> Iterator[Hit]:
    for flag in run.arguments.flags:
        for value in flag.values if flag.name in _PATHS else ():
            raw = value.endswith((".json", ".jsonl")) and not run.on("--sft")
            if (value.endswith((".bin", ".idx")) or raw) and is_told(value[-4:]):
                message = f"{value} is a file; Megatron looks for {value}.bin and {value}.idx, which aren't there."
                fix = "Run preprocess_data.py, and name its output's prefix." if raw else f"Write {value[:-4]}."
                yield run.hit_at(flag, message, fix)
