"""Where conf, recipes and templates are: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_root() -> Path:
    """The folder that holds conf/, recipes/ and templates/."""
    installed = _PACKAGE / "_data"
    return installed if installed.is_dir() else _PACKAGE.parent


def data_dirs(kind: str, site: Path | None = None) -> list[Path]:
    """The folders to search for `kind` (conf, recipes or templates): the site's first, then the package's."""
    roots = [site] if site else []
    return [root / kind for root in [*roots, data_root()] if (root / kind).is_dir()]
