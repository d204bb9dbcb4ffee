"""Limits in the units that the frameworks take."""

from __future__ import annotations

from dslaunch.errors import ConfigError


def whole_minutes(minutes: float) -> int:
    """`minutes` as an integer; raises ConfigError where it is none, for nothing is rounded silently."""
    if minutes != int(minutes):
        raise ConfigError(
            f"launcher.timeout_minutes is {minutes}: Megatron and DeepSpeed take whole minutes. Round it "
            "up or down"
        )
    return int(minutes)
