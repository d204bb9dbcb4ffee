"""`dslaunch import hf`: a model file from a configuration of Hugging Face's transformers."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from pydantic import ValidationError

from dslaunch.errors import ConfigError
from dslaunch.importing.hf_connectors import JOINS
from dslaunch.importing.hf_fields import Fields, refuse_unknown
from dslaunch.importing.hf_joined import vision_language
from dslaunch.importing.hf_text import DECODERS, decoder
from dslaunch.importing.hf_vision import TOWERS, tower
from dslaunch.importing.imported import Imported, Note, checked_name
from dslaunch.importing.writing import yaml_text
from dslaunch.schema.model import Model

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TOWER_OF = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}
"""Models of two towers, of which the vision tower is taken."""
KNOWN = tuple(sorted({*DECODERS, *TOWERS, *JOINS, *_TOWER_OF}))


def import_hf(source: str, name: str = "") -> Imported:
    """The model file of a configuration.

    Args:
        source: config.json, a folder that holds one, or the id of a repository on the Hub.
        name: the model's name; made from the source where it is empty.

    Raises:
        ConfigError: nothing there, not a configuration, or an architecture that is not known.
    """
    text, shown = _read(source)
    config = _parsed(text, source)
    kind = config.get("model_type")
    refuse_unknown(kind, f"{source}: ", KNOWN)
    try:
        graph, notes = _graph(config, str(kind))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    name = checked_name(name, shown)
    model: dict[str, Any] = {"name": name, "source": f"{shown} config.json (model_type {kind})", **graph}
    _check(model, source)
    head = [f"Imported from a configuration of transformers, model_type {kind}."]
    if notes:
        head += ["Not carried over:", *(f"  {note}" for note in notes)]
    return Imported(name, {f"conf/model/{name}.yaml": yaml_text(model, head)}, notes)


def _check(model: Mapping[str, Any], source: str) -> None:
    try:
        Model.model_validate(model)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(key) for key in first["loc"])
        raise ConfigError(f"{source}: {where}: {first['msg'].removeprefix('Value error, ')}") from error


def _graph(config: Mapping[str, Any], kind: str) -> tuple[dict[str, Any], tuple[Note, ...]]:
    if kind in JOINS:
        return vision_language(config, kind)
    if kind in _TOWER_OF:
        section = config.get("vision_config", {})
        if not isinstance(section, Mapping):
            raise ConfigError(f"vision_config is {section!r}: a section with keys of its own belongs here")
        fields = Fields(section, _TOWER_OF[kind], "vision_config.")
        component = tower(fields)
        return {"components": {"vision_encoder": component}}, (
            Note("text_config", "the text tower is left out, the vision tower is imported"), *fields.finish(),
        )  # fmt: skip
    fields = Fields(config, kind)
    if kind in TOWERS:
        return {"components": {"vision_encoder": tower(fields)}}, fields.finish()
    return {"components": {"llm": decoder(fields)}}, fields.finish()


def _parsed(text: str, source: str) -> Mapping[str, Any]:
    try:
        config = json.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply. Give transformers' config.json.") from error
    except ValueError as error:
        raise ConfigError(f"{source}: not JSON: {error}. Give transformers' config.json.") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigError(
            f"{source}: has no model_type, so it is no config.json of transformers. Give that file."
        )
    return config


def _read(source: str) -> tuple[str, str]:
    """The text of config.json, and the name its model goes by."""
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{source}: byte {error.start} is no UTF-8. Give a config.json.") from error
        stem = file.resolve().parent.name if file.name == "config.json" else file.stem
        return text, str(_name_in(text) or stem)
    if source.endswith(".json") or not _HUB_ID.fullmatch(source) or path.exists():
        raise ConfigError(
            f"{source}: no such file. Give a config.json, its folder, or a Hub id (OWNER/NAME)."
        )
    return _from_hub(source), source.rpartition("/")[2]


def _name_in(text: str) -> str:
    """The name that the file itself gives, where it is an id and no path of another machine."""
    try:
        named = json.loads(text).get("_name_or_path", "")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return named.rpartition("/")[2] if isinstance(named, str) and named.count("/") == 1 else ""


def _from_hub(source: str) -> str:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError(
            f"{source}: neither a file nor a folder, and huggingface_hub, which fetches Hub ids, is not "
            "installed. Install it, or give the path of config.json."
        )
    from huggingface_hub import constants, hf_hub_download

    here = not _found(constants.ENDPOINT)  # the hub's client would ask six times, for half a minute
    try:
        path = hf_hub_download(source, "config.json", local_files_only=here)
        return Path(path).read_text(encoding="utf-8")
    except Exception as error:  # the hub's own errors and those of its transports have no common class
        unknown = f"{urlsplit(constants.ENDPOINT).hostname} has no address here, and no copy is kept."
        first = unknown if here else str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{source}: not a file here, and config.json could not be fetched from the Hub: {first} "
            "Give the path of config.json."
        ) from error


def _found(endpoint: str) -> bool:
    """Whether the host has an address here; behind a proxy it is the proxy that looks."""
    if getproxies():
        return True
    try:
        socket.getaddrinfo(urlsplit(endpoint).hostname, None)
    except OSError:
        return False
    return True
