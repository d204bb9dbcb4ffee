"""Pages that open from disk: one file each, nothing fetched, whatever was typed shown and not interpreted."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dslaunch.review.difference import Difference
from dslaunch.review.figures_text import amount, change_of, name_of, value


def html_page(template: str, **context: Any) -> str:
    """The page of `pages/TEMPLATE`."""
    environment = Environment(
        loader=PackageLoader("dslaunch.review", "pages"), undefined=StrictUndefined, autoescape=True
    )
    return environment.get_template(template).render(**context)


def diff_html(found: Difference) -> str:
    """The whole comparison."""
    return html_page(
        "diff.html.j2",
        found=found,
        keys=[(c.kind, c.key, value(c.before), value(c.after)) for c in found.keys],
        layouts=[(c.component, c.before or "none", c.after or "none") for c in found.layouts],
        figures=[
            (name_of(f), amount(f.before, f.unit), amount(f.after, f.unit), change_of(f))
            for f in found.figures
        ],
    )
