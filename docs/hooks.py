"""What MkDocs makes of the program itself: the reference, and a page for each rule. Nothing of it is committed."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from dslaunch import cli
from dslaunch.arguments import VERBS
from dslaunch.render.context import Context, Host
from dslaunch.render.environment import Variable
from dslaunch.render.slurm import SlurmContext
from dslaunch.review import json_schema, keys
from dslaunch.rules.output import page as rule_page
from dslaunch.rules.registry import rules

Section = tuple[str, str, list[keys.Key]]
"""Dotted name, title where several share the name, keys."""
_REPOSITORY = "../dslaunch/rules/pages/"
"""Where docs/rules.md finds the rules' pages when it is read in a checkout."""

_RUNNING = "Running"
"""The section of the pages of docs/ that mkdocs.yml does not name: those about running a plan."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages that no menu names into the section before the reference, each by its heading."""
    assert config.nav
    named = set(_named(config.nav))
    pages = [path for path in sorted(Path(config.docs_dir).glob("*.md")) if path.name not in named]
    if pages:
        config.nav.insert(len(config.nav) - 1, {_RUNNING: [{_heading(path): path.name} for path in pages]})
    return config


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for inner in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _named(inner)


def _heading(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made here."""
    for name, text in made().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to the rules' pages lead to those of the site."""
    return markdown.replace(f"]({_REPOSITORY}", "](rules/")


def made() -> dict[str, str]:
    """Path under docs/ -> text."""
    schemas = {f"reference/schemas/{_file(name)}": json_schema.json_schema(name) for name in json_schema.names()}
    return {
        "reference/keys.md": keys_page(),
        "reference/command-line.md": command_line_page(),
        "reference/json.md": json_page(),
        "reference/templates.md": templates_page(),
        **{name: json.dumps(schema, indent=2) + "\n" for name, schema in schemas.items()},
        **{f"rules/{rule_id}.md": rule_page(rule_id) for rule_id in rules()},
    }


def keys_page() -> str:
    """Every key of a recipe, a model file and a cluster file."""
    parts = [_text("keys.md")]
    for section, title, found in _once(_sections("")):
        rows = [
            (f"`{key.key}`", key.type, key.unit, _default(key), key.meaning)
            for key in found
            if "section" not in key.type or key.meaning
        ]
        heading = f"## {section or 'The recipe'}" + (f": {title}" if title else "")
        parts.append(f"{heading}\n\n{_table(('key', 'type', 'unit', 'default', 'meaning'), rows)}")
    return "\n".join(parts)


def _once(found: Iterable[Section]) -> Iterator[Section]:
    """Without what several architectures share."""
    seen: list[Section] = []
    for section in found:
        if section not in seen:
            seen.append(section)
            yield section


def _sections(dotted: str) -> Iterator[Section]:
    """(section, title, keys) of a section and of all below it; of `layouts`, which repeats `strategy`, nothing."""
    inner: dict[str, None] = {}
    for title, found in keys.sections(dotted):
        yield dotted, title, found
        for key in found:
            if key.type == "section":
                inner[key.key] = None
            elif key.type in ("{NAME: section}", "{NAME: section | section}") or key.key.endswith("components"):
                inner[f"{key.key}.NAME"] = None
            elif key.type == "[section]":
                inner[f"{key.key}.0"] = None
    for section in inner:
        yield from _sections(section)


def _default(key: keys.Key) -> str:
    """The default, and the file where it is not the schema's."""
    if key.source.startswith("conf/"):
        return f"`{key.default}` ({key.source})"
    return f"`{key.default}`" if key.default and key.default != "required" else key.default


def command_line_page() -> str:
    """Verbs with their options, and the exit statuses."""
    parts = [_text("command-line.md"), f"## Exit statuses\n\n{_table(('status', 'meaning'), _statuses())}"]
    for name in VERBS:
        command = cli.main.commands[name]
        parts.append(f"## {name}\n\n{_sentence(VERBS[name])}\n\n{_usage(name, command)}{_options(command)}")
    return "\n".join(parts)


def _statuses() -> Iterator[tuple[str, str]]:
    listed = (cli.run.__doc__ or "").partition("\n\n")[2]
    for part in " ".join(listed.split()).rstrip(".").split("; "):
        status, _, meaning = part.partition(" ")
        yield f"`{status}`", meaning


def _usage(name: str, command: click.Command) -> str:
    words = [p.make_metavar(click.Context(command)) for p in command.params if isinstance(p, click.Argument)]
    return f"    dslaunch {name} {' '.join(words)} [OPTIONS]\n\n"


def _options(command: click.Command) -> str:
    options = [option for option in command.params if isinstance(option, click.Option)]
    rows = [(f"`{_typed(option)}`", option.help or "") for option in options]
    return _table(("option", "meaning"), rows) if rows else ""


def _typed(option: click.Option) -> str:
    value = "" if option.is_flag else f" {option.make_metavar(click.Context(cli.main))}"
    return f"{', '.join(option.opts)}{value}"


def json_page() -> str:
    """Every output with a schema."""
    rows = []
    for name in json_schema.names():
        schema = json_schema.json_schema(name)
        about = schema["description"].partition("\n")[0]
        holds = ", ".join(f"`{key}`" for key in schema["properties"])
        rows.append((f"[`{name}`](schemas/{_file(name)})", about, holds))
    return f"{_text('json.md')}\n{_table(('schema', 'what it is', 'holds'), rows)}"


def _file(name: str) -> str:
    return f"{name.replace('/', '-')}.json"


def templates_page() -> str:
    """The context of templates, from the dataclasses that make it."""
    parts = [_text("templates.md")]
    for kind in (Context, Host, Variable, SlurmContext):
        docs = json_schema.field_docs(kind)
        rows = [(f"`{f.name}`", str(f.type), docs.get(f.name, "")) for f in dataclasses.fields(kind)]
        about = inspect.cleandoc(kind.__doc__ or "")
        parts.append(f"## {kind.__name__}\n\n{about}\n\n{_table(('field', 'type', 'meaning'), rows)}")
    return "\n".join(parts)


def _text(name: str) -> str:
    """What a person wrote above a page that is made."""
    return (Path(__file__).parent / "preface" / name).read_text(encoding="utf-8")


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "".join(f"| {' | '.join(_cell(text) for text in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
