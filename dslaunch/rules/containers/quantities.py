"""Quantities of Kubernetes: 64Gi, 500m, 8."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from dslaunch.files.manifest import Container, as_dict, get
from dslaunch.rules.containers.fields import Found

_QUANTITY = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
_FILLED = re.compile(r"[$<>%{}]|(?<![A-Za-z])[A-Z]+(?:_[A-Z]+)+|^[A-Z]{3,}$")
"""What a program of its own fills in: $NAME, <NAME>, {{ name }}; NAMESPACE and data-MODEL_NAME, which sed does."""
_LEAST = 1 << 20
"""Bytes below which no memory is meant."""
_UNITS: Mapping[str, float] = {
    "n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip


def is_open(value: object) -> bool:
    """Whether something is filled in later, or it is no text."""
    return not isinstance(value, str) or _FILLED.search(value) is not None


def is_quantity(text: str) -> bool:
    """Whether the API reads it."""
    return _QUANTITY.fullmatch(text) is not None


def amount(value: object) -> float | None:
    """What a quantity counts; None where it isn't told."""
    found = re.fullmatch(r"([+-]?[\d.]+(?:[eE][+-]?\d+)?)([a-zA-Z]*)", str(value))
    told = isinstance(value, (str, int, float)) and not isinstance(value, bool) and is_quantity(str(value))
    return float(found[1]) * _UNITS[found[2]] if told and found else None


def mended(text: str) -> str:
    """How it is meant: 64Gi for 64GB."""
    number = re.match(r"[\d.]+", text)
    unit = text[number.end() :].strip().rstrip("bB").lower() if number else ""
    units = {"g": "Gi", "gi": "Gi", "k": "Ki", "ki": "Ki", "m": "Mi", "mi": "Mi", "t": "Ti", "ti": "Ti"}
    return f"{number[0]}{units[unit]}" if number and unit in units else "a number with such a unit"


def of_resources(container: Container) -> Iterator[Found]:
    """What the API doesn't take of limits and requests."""
    limits = as_dict(get(container.value, "resources", "limits"))
    requests = as_dict(get(container.value, "resources", "requests"))
    for kind, values in (("limits", limits), ("requests", requests)):
        for name, value in values.items():
            path = (*container.path, "resources", kind, str(name))
            text = str(value)
            if value is None or isinstance(value, (dict, list, bool)) or is_open(text):
                continue
            if not is_quantity(text):
                message = f"{text} is no quantity: Ki, Mi, Gi, Ti, or k, M, G, T."
                yield path, message, f"Write {mended(text)}."
            elif "/" in str(name) and not text.isdecimal() and (amount(text) or 0) % 1:
                yield path, f"{text} of {name}: the API takes whole numbers of a device.", "Write a whole number."
            elif name == "memory" and text.endswith("m"):
                message = f"memory: {text} is thousandths of a byte: no container starts in it."
                yield path, message, f"Write {text[:-1]}Mi."
            elif name == "memory" and 0 < (amount(text) or 0) < _LEAST:
                yield path, f"memory: {text} is {text} bytes: no container starts in it.", f"Write {text}Gi."
    for name, value in requests.items():
        limit = limits.get(name)
        path = (*container.path, "resources", "requests", str(name))
        device = "/" in str(name) and name != "nvidia.com/gpu" and not str(name).startswith("kubernetes.io/")
        if isinstance(value, (dict, list)) or isinstance(limit, (dict, list)):
            continue
        if device and limit is None:
            message = f"{name} in requests and no limit: the API refuses the pod."
            yield path, message, f"Write the same number under limits: {name}: {value}."
        elif (amount(value) or 0) > (amount(limit) or float("inf")):
            message = f"{value} of {name} is more than the limit, {limit}: the API refuses the pod."
            yield path, message, "Write at most the limit."
