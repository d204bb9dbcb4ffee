"""`python -m dslaunch.runtime.forms convert|export CHECKPOINT OUT [--json]`: what verbs of those names start."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dslaunch.errors import DslaunchError

SCHEMA = "dslaunch.forms/1"


@dataclass(frozen=True)
class Form:
    """One folder that was written."""

    folder: str
    component: str
    """Empty: all of them."""
    tensors: int
    """Weights; `convert` writes their moments beside them."""
    architecture: str
    """The class of transformers that reads it; empty: none does."""


def main(argv: list[str]) -> int:
    """Write the checkpoint in another form; the exit status."""
    verb, checkpoint, to = argv[0], Path(argv[1]), Path(argv[2])
    try:
        made = _converted(checkpoint, to) if verb == "convert" else _exported(checkpoint, to)
    except DslaunchError as error:
        print(f"dslaunch: {error}", file=sys.stderr)
        return error.status
    except ModuleNotFoundError as error:
        print(f"dslaunch: {error} in {sys.executable}. Install dslaunch[runtime] there.", file=sys.stderr)
        return 2
    if "--json" in argv[3:]:
        print(json.dumps({"schema": SCHEMA, "verb": verb, "forms": [asdict(form) for form in made]}, indent=2))
    else:
        print("\n".join(map(_line, made)))
    return 0


def _line(made: Form) -> str:
    if not made.component:
        return (
            f"{made.folder}: {made.tensors} whole tensors with their moments; checkpoint.load={made.folder} goes "
            "on from it"
        )
    reader = made.architecture or "no class of transformers"
    return f"{made.folder}: {made.component}, {made.tensors} tensors, {reader}"


def _converted(checkpoint: Path, to: Path) -> list[Form]:
    from dslaunch.runtime.convert import convert

    return [Form(str(to), "", convert(checkpoint, to), "")]


def _exported(checkpoint: Path, to: Path) -> list[Form]:
    from dslaunch.runtime.export import export

    return [
        Form(str(made.folder), made.component, made.tensors, _architecture(made.config))
        for made in export(checkpoint, to)
    ]


def _architecture(config: dict[str, Any]) -> str:
    """The class that config.json names, or at least the type of the model."""
    named = config.get("architectures")
    return str(named[0] if named else config.get("model_type", ""))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
