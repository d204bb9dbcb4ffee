"""manifest.json: the hash of every rendered file, by which a launch proves that it runs what was reviewed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from dslaunch import __version__
from dslaunch.planfile import to_json

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = "dslaunch.manifest/1"


def manifest(files: Mapping[str, str]) -> str:
    """The text of manifest.json over all `files` (name: text) but itself; hashes are of the UTF-8 bytes."""
    others = {name: text for name, text in files.items() if name != MANIFEST}
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in others.items()}
    return to_json({"schema": MANIFEST_SCHEMA, "dslaunch": __version__, "files": hashes})
