"""Weights out of safetensors files, of which a rank reads its own part only.

A folder holds `model.safetensors`, or the files that `model.safetensors.index.json` names (the layout that
transformers' save_pretrained writes). A module says under which names its parameters stand there by
`file_names: Mapping[str, str]`, from the beginning of its own names to the beginning of theirs, the longest that
fits, and by `file_words`, pairs of what is replaced further on; without them they have the same names. Parameters
whose names begin as one of `fresh` says are not read: they start from random values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dslaunch.errors import ConfigError, listed
from dslaunch.runtime.tensor_parallel import Shard, parts_of

_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_weights(folder: Path, name: str, module: nn.Module, uncut: nn.Module, shard: Shard) -> None:
    """Fill `module`, a piece of component `name`, with what it holds of the tensors in `folder`.

    Args:
        uncut: the whole component, by which missing and unknown names are judged; may be on the meta device.

    Raises:
        ConfigError: names or shapes that do not agree, on every rank alike, or no such files.
    """
    files = _files(folder, name)
    wanted, whole = _read(module), _read(uncut)
    _check_names(folder, name, uncut, set(whole), set(files))
    with ExitStack() as opened:
        handles: dict[str, Any] = {}
        for file in sorted({files[key] for key in whole}):
            handles[file] = opened.enter_context(_open(folder / file, name))
        _check_shapes(folder, name, {key: (p.shape, handles[files[key]]) for key, p in whole.items()})
        for key, parameter in wanted.items():
            with torch.no_grad():
                _fill(parameter, handles[files[key]].get_slice(key), shard)


def _files(folder: Path, name: str) -> dict[str, str]:
    """The file of each tensor in `folder`, by the tensor's name."""
    try:
        if (folder / _INDEX).is_file():
            return dict(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / _INDEX}: not an index of safetensors files: {error!r}.") from error
    if not (folder / _ONE).is_file():
        raise ConfigError(
            f"weights of model.components.{name}: neither {_ONE} nor {_INDEX} in {folder}. Name the folder that "
            "save_pretrained wrote."
        )
    with _open(folder / _ONE, name) as file:
        return dict.fromkeys(file.keys(), _ONE)


def _open(path: Path, name: str) -> Any:
    try:
        from safetensors import safe_open
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"weights of model.components.{name}: {error}. Install safetensors in the training environment."
        ) from error
    try:
        return safe_open(path, framework="pt")
    except Exception as error:
        raise ConfigError(f"{path}: not a safetensors file that can be read: {error}.") from error


def fresh_in(module: nn.Module) -> tuple[str, ...]:
    """Beginnings of the names of parameters that start from random values, whatever files there are."""
    return tuple(getattr(module, "fresh", ()))


def _read(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are read, by their names in the files."""
    fresh = fresh_in(module)
    return {there(module, key): p for key, p in module.named_parameters() if not key.startswith(fresh)}


def there(module: nn.Module, key: str) -> str:
    """The name of parameter `key` in the files."""
    names: Mapping[str, str] = getattr(module, "file_names", {})
    fitting = [start for start in names if key.startswith(start)]
    if not fitting:
        return key
    start = max(fitting, key=len)
    rest = key[len(start) :]
    for ours, theirs in getattr(module, "file_words", ()):
        rest = rest.replace(ours, theirs)
    return names[start] + rest


def _check_names(folder: Path, name: str, uncut: nn.Module, wanted: set[str], found: set[str]) -> None:
    """What stands in the files under the beginnings of the component's names is its own, or not read by it."""
    if missing := sorted(wanted - found):
        raise ConfigError(
            f"weights of model.components.{name}: {folder} lacks {len(missing)} tensors, such as "
            f"{listed(missing[:3])}; it has {listed(sorted(found)[:3])}, ... Set module_args.names, from the "
            "beginning of the module's names to the beginning of those in the files."
        )
    starts = tuple(getattr(uncut, "file_names", {"": ""}).values())
    unread = tuple(getattr(uncut, "unread", ()))
    extra = sorted(key for key in found - wanted if key.startswith(starts) and not key.startswith(unread))
    if extra:
        raise ConfigError(
            f"weights of model.components.{name}: {folder} has {len(extra)} tensors that the module lacks, such "
            f"as {listed(extra[:3])}. The settings of the module and the files differ."
        )


def _check_shapes(folder: Path, name: str, tensors: Mapping[str, tuple[torch.Size, Any]]) -> None:
    for key, (shape, handle) in tensors.items():
        found = tuple(handle.get_slice(key).get_shape())
        if found != tuple(shape):
            raise ConfigError(
                f"weights of model.components.{name}: {key} in {folder} has shape {list(found)}; the module's is "
                f"{list(shape)}. The settings of the module and the files differ."
            )


def _fill(parameter: Tensor, stored: Any, shard: Shard) -> None:
    """Read what `parameter` holds of `stored`, part by part."""
    dim = getattr(parameter, "tp_dim", None)
    if dim is None:
        parameter.copy_(stored[:])
        return
    parts = parts_of(parameter)
    for part, target in enumerate(parameter.chunk(parts, dim)):
        length = target.shape[dim]
        start = (part * shard.size + shard.rank) * length
        here = (slice(None),) * dim + (slice(start, start + length),)
        target.copy_(stored[here])
