"""What every part of the configuration is made of: strict, frozen models with documented fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1, le=2**53)]
NonNegative = Annotated[int, Field(ge=0, le=2**53)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e15)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e15)]
_NAME, _VARIABLE = r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$", r"^[A-Za-z_][A-Za-z0-9_]*$"
_VALUE, _VARIABLE_OR_NONE = r"^[A-Za-z0-9_.,:=^+/@-]+$", r"^([A-Za-z_][A-Za-z0-9_]*)?$"
PATTERNS = {
    _NAME: "letters, digits, _ . + -, and begins with a letter or digit",
    _VARIABLE: "the name of an environment variable: letters, digits and _, and begins with no digit",
    _VALUE: "letters, digits and _ . , : = ^ + / @ -",
    _VARIABLE_OR_NONE: "the name of an environment variable: letters, digits and _, and begins with no digit",
}
"""Every pattern of a text, and what it takes in words."""
Name = Annotated[str, Field(pattern=_NAME)]
VariableName = Annotated[str, Field(pattern=_VARIABLE)]
VariableNameOrNone = Annotated[str, Field(pattern=_VARIABLE_OR_NONE)]
VariableValue = Annotated[str, Field(pattern=_VALUE)]
# YAML has lists only; strict pydantic takes a list for a tuple where the tuple itself is lax.
Texts = Annotated[tuple[str, ...], Field(strict=False)]
Counts = Annotated[tuple[Positive, ...], Field(strict=False)]


class Part(BaseModel):
    """A part of the configuration: no unknown key, no silent conversion, no change after validation."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        populate_by_name=True,
    )
