"""What a training script is, read as a syntax tree; it is never run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dslaunch.errors import ConfigError

_TRAINERS = ("Trainer", "Seq2SeqTrainer", "SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer")
_ARGUMENT_PARSERS = ("HfArgumentParser", "TrlParser")
_DATACLASS_PARSERS = (
    "draccus",
    "tyro",
    "simple_parsing",
    "HfArgumentParser",
    "TrlParser",
    "pyrallis",
    "jsonargparse",
)
_SETTINGS_CALLS = ("TrainingArguments", "SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "Accelerator")
"""What takes settings of a training as keywords; the first by the end of its name."""
_FULLY_SHARDED = ("fully_shard", "FullyShardedDataParallel", "fsdp")


@dataclass(frozen=True)
class Script:
    """Facts of a script."""

    names: frozenset[str]
    """Every name that is imported, called or read, attributes by their last part, modules by each part."""
    calls: frozenset[str]
    """What is called, dotted: deepspeed.initialize."""
    options: tuple[str, ...]
    """Options of its command line, as they are declared there: --batch_size."""
    adapters: tuple[tuple[str, str], ...] = ()
    """Keywords of peft's LoraConfig and their values as written; empty where the script has none."""
    numbers: tuple[tuple[str, float], ...] = ()
    """Name -> number or truth value of what the script sets itself, the first of a name: keywords of
    TrainingArguments and their like, defaults of its options and of its dataclasses."""

    @property
    def kind(self) -> str:
        """hf_trainer | accelerate | megatron | deepspeed | fsdp | ddp, or empty where nothing distributes work."""
        if self.has(*_TRAINERS) and self.has("transformers", "trl"):
            return "hf_trainer"
        if "Accelerator" in self.names:
            return "accelerate"
        if "megatron" in self.names and self.has("pretrain"):
            return "megatron"
        if "deepspeed.initialize" in self.calls:
            return "deepspeed"
        if self.has(*_FULLY_SHARDED):
            return "fsdp"
        return "ddp" if self.has("DistributedDataParallel", "DDP", "init_process_group") else ""

    @property
    def takes_trainer_options(self) -> bool:
        """Whether TrainingArguments come from the command line."""
        return any(call.rpartition(".")[2] in _ARGUMENT_PARSERS for call in self.calls)

    def has(self, *names: str) -> bool:
        """Whether one of `names` occurs."""
        return not self.names.isdisjoint(names)


def read_script(text: str, path: str) -> Script:
    """The facts of the Python file `text`; raises ConfigError where it is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise ConfigError(
            f"{path}:{line}: not Python: {getattr(error, 'msg', error)}. Give a training script."
        ) from error
    nodes = list(ast.walk(tree))
    names = frozenset(name for node in nodes for name in _names(node))
    calls = frozenset(_dotted(node.func) for node in nodes if isinstance(node, ast.Call))
    declared = [*_declared(nodes), *(_fields(nodes) if not names.isdisjoint(_DATACLASS_PARSERS) else ())]
    numbers = dict([*reversed([*_keywords(nodes), *_option_defaults(nodes), *_field_defaults(nodes)])])
    return Script(names, calls, tuple(dict.fromkeys(declared)), tuple(_adapters(nodes)), tuple(numbers.items()))


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            yield from alias.name.split(".")
        yield from (getattr(node, "module", None) or "").split(".")
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr


def _adapters(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Keywords of the first LoraConfig(...)."""
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    config = next((call for call in calls if _dotted(call.func).rpartition(".")[2] == "LoraConfig"), None)
    for word in config.keywords if config else ():
        yield word.arg or "", ast.unparse(word.value)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _keywords(nodes: list[ast.AST]) -> Iterator[tuple[str, float]]:
    """Settings of the training that are given as keywords in the script."""
    for node in nodes:
        if isinstance(node, ast.Call) and _dotted(node.func).rpartition(".")[2].endswith(_SETTINGS_CALLS):
            yield from _numbers((word.arg or "", word.value) for word in node.keywords)


def _option_defaults(nodes: list[ast.AST]) -> Iterator[tuple[str, float]]:
    for node in nodes:
        for option in _declared([node]):
            assert isinstance(node, ast.Call)
            name = option.lstrip("-").replace("-", "_")
            yield from _numbers((name, word.value) for word in node.keywords if word.arg == "default")


def _field_defaults(nodes: list[ast.AST]) -> Iterator[tuple[str, float]]:
    """Of dataclasses, `field(default=...)` among them."""
    for line in _field_lines(nodes):
        assert isinstance(line.target, ast.Name)
        value = line.value
        if isinstance(value, ast.Call):
            value = next((word.value for word in value.keywords if word.arg == "default"), None)
        yield from _numbers([(line.target.id, value)] if value else [])


def _numbers(written: Iterable[tuple[str, ast.expr]]) -> Iterator[tuple[str, float]]:
    for name, node in written:
        try:
            value = ast.literal_eval(node)
        except ValueError:
            continue
        if isinstance(value, int | float):
            yield name, value


def _declared(nodes: list[ast.AST]) -> Iterator[str]:
    """Options of argparse and click: the long spelling of each."""
    for node in nodes:
        if isinstance(node, ast.Call) and _dotted(node.func).rpartition(".")[2] in ("add_argument", "option"):
            words = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from (word for word in words if word.startswith("--"))


def _fields(nodes: list[ast.AST]) -> Iterator[str]:
    """Fields of dataclasses, which such parsers make options of."""
    yield from (f"--{ast.unparse(line.target)}" for line in _field_lines(nodes))


def _field_lines(nodes: list[ast.AST]) -> Iterator[ast.AnnAssign]:
    for node in nodes:
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line
