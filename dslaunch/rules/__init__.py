"""Rules about files and plans, and what runs them. The tables and rules load at the first check."""

from __future__ import annotations

from dslaunch.rules.checking import check, check_paths, check_rendered, fails
from dslaunch.rules.output import format_json, format_text, page
from dslaunch.rules.registry import SEVERITIES, Rule, rules
from dslaunch.rules.settings import Settings
from dslaunch.rules.waivers import waive

__all__ = [
    "SEVERITIES", "Rule", "Settings", "check", "check_paths", "check_rendered", "fails", "format_json",
    "format_text", "page", "rules", "waive",
]  # fmt: skip
