"""What all groups of settings share: they are frozen, know their keys, and take text by their fields' types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ..shell import MARK
from .convert import convert
from .text import free

Precision = Literal["fp32", "bf16", "fp16"]
TextList = tuple[str, ...]
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]


SHELL_VALUES = "env, tmpdir and proxy"  # settings whose value may be shell text, marked by `!sh`
_SHELL_FIELDS = ("env", "tmpdir", "http", "https", "no")


class Section(BaseModel):
    """Frozen; an unknown key is an error; text becomes the field's type by `convert`'s rules alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _from_text(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        if isinstance(value, str) and value.startswith(MARK) and name not in _SHELL_FIELDS:
            raise ValueError(f"expected text that is no shell value: !sh is for {SHELL_VALUES} only")
        return free(value) if name == "params" else convert(value, cls.model_fields[name].annotation)
