"""Files that a ConfigMap holds, read like files in their place, beside the commands that name them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

from dslaunch.files import hostfile, relaxed_json, script, yaml_text
from dslaunch.files.fileset import File, FileSet
from dslaunch.files.heredoc import Written
from dslaunch.files.kinds import json_kind, looks_like_json, looks_like_yaml, text_kind, yaml_kind
from dslaunch.files.manifest import as_dict, documents
from dslaunch.files.relaxed_json import Document
from dslaunch.rules.containers.manifests import of_containers, written_block
from dslaunch.rules.known import told
from dslaunch.rules.registry import Hit
from dslaunch.rules.settings import Settings
from dslaunch.rules.shell.heredocs import Inner

_MOST = 20
"""Files in the ConfigMaps of one manifest that are read."""
_KINDS = ("accelerate", "deepspeed_json", "hf_arguments")


@dataclass(frozen=True)
class Mounted(Inner):
    """A file of a ConfigMap, or a container's script, with those of the manifest that name it or that it names."""

    key: str
    """Its name; empty for a container's command."""
    others: tuple[File, ...] = ()

    def beside(self, files: FileSet) -> FileSet:
        """It, with those, and the files outside that they don't stand for."""
        found = super().beside(files)
        taken = {other.kind for other in self.others} & {"deepspeed_json", "accelerate", "hostfile"}
        outside = (file for file in found.files[1:] if file.kind not in taken)
        return FileSet((self.file, *self.others, *outside), files.folders)

    def known(self, settings: Settings) -> Settings:
        """The settings, with what the launches among them say of ranks."""
        if settings.world_size is not None:
            return settings
        return told(FileSet((self.file, *self.others)), settings)

    def moved(self, hit: Hit) -> Hit | None:
        """The hit where it stands in the manifest; None where it is another's of them."""
        lines = self.written.text.rstrip("\n").count("\n") + 1
        if hit.at is None or hit.name != self.file.name:
            return hit
        if not self.written.start.line <= hit.at.line <= lines:
            return None if self.others or self.key else super().moved(hit)
        kind = self.file.kind
        return replace(hit, at=self.written.at(hit.at), edit=None) if kind != "hostfile" else hit


def in_manifests(files: FileSet) -> Iterator[Inner]:
    """What the manifests' containers run, and the files in their ConfigMaps."""
    for file in files.of("kubernetes"):
        maps = [*_of_maps(file)][:_MOST]
        commands = [inner for _, _, inner in of_containers(FileSet((file,)))]
        every = [Mounted(one.file, one.written, one.outer, "") for one in commands] if maps else []
        every += maps
        yield from commands if not maps else (_with_others(each, every) for each in every)


def _with_others(inner: Mounted, every: list[Mounted]) -> Mounted:
    """With the files that it names, or the scripts that name it."""
    named = [each for each in every if each is not inner and (_names(inner, each) or _names(each, inner))]
    scripts = {id(each) for each in named if each.file.kind == "shell"}
    through = [  # run.sh that the command runs, and the JSON that run.sh names
        each for each in every
        if id(each) not in scripts and each is not inner and inner.file.kind != "shell"
        and any(_names(script, each) for script in named if script.file.kind == "shell")
    ]  # fmt: skip
    others = {id(each): each.file for each in (*named, *through) if each.file.kind != inner.file.kind}
    return replace(inner, others=tuple(others.values()))


def _names(one: Mounted, other: Mounted) -> bool:
    """Whether a script's words hold the other's name."""
    if one.file.kind != "shell" or not other.key:
        return False
    return any(other.key in word.text for command in one.file.value.commands for word in command.words)


def _of_maps(file: File) -> Iterator[Mounted]:
    for path, each in documents(file.value):
        if each.get("kind") == "ConfigMap" and each.get("apiVersion") == "v1":
            for key, text in as_dict(each.get("data")).items():
                if isinstance(text, str) and "\n" in text and isinstance(key, str) and "{{" not in text:
                    written = written_block(file, (*path, "data", key), text)
                    if found := _read(file, key, text, written):
                        yield Mounted(found, written, file, key)


_SHELL_KEY = re.compile(r"^[^.]*$|\.(?:sh|bash|sbatch|slurm|sub|job)$")
_SHELL_LINE = re.compile(r"\s*#!.*\b(?:ba|da|z)?sh\b")


def _read(file: File, key: str, text: str, written: Written) -> File | None:
    """What one text is, where it is any kind that rules know."""
    if looks_like_json(key, text) or looks_like_yaml(key):
        try:
            is_json = looks_like_json(key, text)
            document = relaxed_json.parse(written.text) if is_json else yaml_text.parse(written.text)
        except (relaxed_json.JsonSyntaxError, yaml_text.YamlError) as error:
            meant = json_kind(key, None) == "deepspeed_json" and "$" not in text
            broken = File(file.name, "deepspeed_json", written.text, problems=(error.problem,), inside=True)
            return broken if meant and looks_like_json(key, text) else None
        return _of_tree(file, key, document, written, is_json=is_json)
    kind = text_kind(key, text)
    if kind == "shell" and (_SHELL_KEY.search(key) or _SHELL_LINE.match(text)):
        value = script.parse(written.text)
        return File(file.name, "shell", written.text, value, problems=value.problems, inside=True)
    if kind == "hostfile":
        above = written.start.line - 1
        hosts = tuple(replace(each, line=each.line + above) for each in hostfile.parse(text))
        return File(file.name, "hostfile", written.text, hosts, inside=True)
    return None


def _of_tree(file: File, key: str, document: Document, written: Written, *, is_json: bool) -> File | None:
    kind = json_kind(key, document.value) if is_json else yaml_kind(key, document.value)
    if kind not in _KINDS:
        return None
    positions = MappingProxyType({(): written.start, **document.positions})
    return File(file.name, kind, written.text, document.value, positions, document.problems, inside=True)
