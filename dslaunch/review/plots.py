"""Plots as SVG text, by Vega-Lite: colours are the page's variables, each mark says in words what it shows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dslaunch.errors import ConfigError

Rows = Sequence[Mapping[str, Any]]
COLOURS = [f"var(--c{number})" for number in range(1, 9)]
_VEGA_LITE = "5.21"
_WIDTH = 760
_MOST_POINTS = 400
"""Of a curve."""
_INK, _FAINT, _LINE = "var(--ink)", "var(--faint)", "var(--line)"
_CONFIG = {
    "background": None,
    "padding": {"left": 28, "right": 12, "top": 4, "bottom": 4},
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {"labelColor": _INK, "titleColor": _INK, "gridColor": _LINE, "domainColor": _FAINT,
             "tickColor": _FAINT, "labelFontSize": 12, "titleFontSize": 12, "labelLimit": 260},
    "legend": {"labelColor": _INK, "titleColor": _INK, "labelFontSize": 12, "orient": "top", "title": None,
               "symbolType": "square", "columns": 8},
}  # fmt: skip


def bars(rows: Rows, terms: Sequence[str], limits: Mapping[str, float]) -> str:
    """Stacked bars of GiB, a bar a row, with a vertical line at each of `limits`.

    Args:
        rows: {"row", "term", "gib", "said"}.
    """
    order = list(dict.fromkeys(row["row"] for row in rows))
    stacked = {
        "mark": "bar",
        "encoding": {
            "y": {"field": "row", "type": "nominal", "sort": order, "title": None},
            "x": _quantity("gib", "GiB on one GPU"),
            "color": _colour("term", terms),
            "order": {"field": "order", "type": "quantitative"},
            "description": {"field": "said"},
        },
    }
    lines = [{"gib": gib, "said": f"{name}: {gib:.1f} GiB"} for name, gib in limits.items()]
    rule = {
        "data": {"values": lines},
        "mark": {"type": "rule", "color": "var(--limit)", "strokeWidth": 2, "strokeDash": [6, 3]},
        "encoding": {"x": {"field": "gib", "type": "quantitative"}, "description": {"field": "said"}},
    }
    ordered = [{**row, "order": terms.index(row["term"])} for row in rows]
    return _svg({"data": {"values": ordered}, "height": {"step": 26}, "layer": [stacked, rule]}, "memory")


def timeline(rows: Rows, kinds: Sequence[str], name: str) -> str:
    """Spans over time, a line a stage.

    Args:
        rows: {"row", "kind", "start", "end", "said"}, in seconds.
    """
    order = list(dict.fromkeys(row["row"] for row in rows))
    present = {row["kind"] for row in rows}
    return _svg({
        "data": {"values": rows},
        "height": {"step": 22},
        "mark": {"type": "bar", "stroke": "var(--paper)", "strokeWidth": 0.4},
        "encoding": {
            "y": {"field": "row", "type": "nominal", "sort": order, "title": None},
            "x": {**_quantity("start", "seconds of the step"), "scale": {"nice": False}},
            "x2": {"field": "end"},
            "color": _colour("kind", [kind for kind in kinds if kind in present]),
            "description": {"field": "said"},
        },
    }, name)  # fmt: skip


def scatter(rows: Rows, kinds: Sequence[str], limit: float) -> str:
    """Candidates by memory and step time.

    Args:
        rows: {"gib", "seconds", "kind", "said"}.
    """
    points = {
        "mark": {"type": "point", "filled": True, "size": 90, "opacity": 0.85},
        "encoding": {
            "x": _quantity("gib", "GiB on the fullest GPU"),
            "y": {**_quantity("seconds", "seconds a step"), "scale": {"zero": False}},
            "color": _colour("kind", kinds),
            "shape": {"field": "kind", "type": "nominal", "scale": {"domain": list(kinds)}},
            "description": {"field": "said"},
        },
    }
    rule = {
        "data": {"values": [{"gib": limit, "said": f"limit of a GPU: {limit:.1f} GiB"}]},
        "mark": {"type": "rule", "color": "var(--limit)", "strokeDash": [6, 3]},
        "encoding": {"x": {"field": "gib", "type": "quantitative"}, "description": {"field": "said"}},
    }
    return _svg({"data": {"values": rows}, "height": 320, "layer": [points, rule]}, "candidates")


def curve(rows: Rows, field: str, title: str, predicted: float | None) -> str:
    """One measured figure over the steps, of a long run every n-th, and the predicted one as a line across.

    Args:
        rows: {"step", FIELD}; a value that is None is a gap.
    """
    drawn = [row for row in rows if row[field] is not None][:: -(-len(rows) // _MOST_POINTS)]
    said = [{**row, "said": f"step {row['step']}: {row[field]:.4g}"} for row in drawn]
    y = {**_quantity(field, title), "scale": {"zero": False}}
    x = {**_quantity("step", "step"), "axis": {"format": "d", "tickCount": min(len(rows) - 1, 10)}}
    layers: list[dict[str, Any]] = [
        {"mark": {"type": "line", "color": COLOURS[0]}, "encoding": {"x": x, "y": y}},
        {"mark": {"type": "point", "filled": True, "size": 24, "color": COLOURS[0]},
         "encoding": {"x": x, "y": y, "description": {"field": "said"}}},
    ]  # fmt: skip
    if predicted is not None:
        layers.append({
            "data": {"values": [{field: predicted, "said": f"predicted: {predicted:.4g}"}]},
            "mark": {"type": "rule", "color": "var(--limit)", "strokeDash": [6, 3]},
            "encoding": {"y": {"field": field, "type": "quantitative"}, "description": {"field": "said"}},
        })  # fmt: skip
    return _svg({"data": {"values": said}, "height": 180, "layer": layers}, field)


def _quantity(field: str, title: str) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "title": title}


def _colour(field: str, domain: Sequence[str]) -> dict[str, Any]:
    scale = {"domain": list(domain), "range": COLOURS[: len(domain)]}
    return {"field": field, "type": "nominal", "scale": scale}


def _svg(spec: dict[str, Any], name: str) -> str:
    """The drawing as an <svg> element, its ids made the page's own.

    Raises:
        ConfigError: the drawing library is missing.
    """
    try:
        import vl_convert
    except ModuleNotFoundError as error:
        raise ConfigError(
            "report: the Python package vl_convert, which draws, is missing here: "
            "install it with `pip install 'dslaunch[report]'`."
        ) from error
    whole = {"width": _WIDTH, "config": _CONFIG, **spec}
    svg: str = vl_convert.vegalite_to_svg(whole, vl_version=_VEGA_LITE)
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
