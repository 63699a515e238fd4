"""Scalars as YAML and the command line write them: text, until something says what type they have.

The free-form rule: what JSON (RFC 8259) calls a number is one, and so is a real such as `.5`; everything else
is text. YAML 1.1's octal, sexagesimal, underscore and yes/no forms are therefore never guessed. On a command line
digits with an unsigned exponent (1234e56) are text too, as they are more often a name than a number.
"""

from __future__ import annotations

import math
import re
from typing import Any

# JSON's numbers, and the reals that YAML and Python write in other ways: .5, 5., 1.e-3, +1e-3.
_NUMBER = re.compile(
    r"-?(?:0|[1-9][0-9]*)(?P<real>(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"
    r"|[+-]?(?P<lax>(?:(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+|(?:0|[1-9][0-9]*)(?=[eE]))(?:[eE][+-]?[0-9]+)?)"
)
# The words of YAML 1.2's core schema.
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


class Plain(str):
    """Text that was written without quotes, so that it may stand for a number, a bool or null."""

    __slots__ = ()


class Typed(Plain):
    """Plain text of a command line, where many an identifier looks like a number."""

    __slots__ = ()


class ShellText(str):
    """Text with the tag `!sh` in YAML; it begins with it here too, where most readers see a text like any other."""

    __slots__ = ()


def is_null(value: Any) -> bool:
    """Whether `value` is None or an unquoted null (empty, `~`, `null`)."""
    return value is None or (isinstance(value, Plain) and value in _NULL)


def number(text: str) -> int | float | None:
    """The finite number that `text` is, or None."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    if match["real"] or match["lax"]:
        value = float(text)
        return value if math.isfinite(value) else None
    try:
        return int(text)
    except ValueError:  # more digits than int() is willing to read
        return None


# Digits with an unsigned exponent, unless as `1e6` and `2.5e6` are written: short commit ids such as 1234e56, 12e4 and
# 0e12345.
_LIKE_AN_ID = re.compile(r"[+-]?(?:[0-9]{2,}[eE][0-9]+|[0-9.]+[eE]0[0-9]+|0[eE][0-9]{2,}|-0)")
_LIKE_A_NUMBER = re.compile(r"[+-]?\.?[0-9][\w.:+-]*", re.ASCII)


def unquoted(text: str) -> str | None:
    """What quotes on a command line keep text, without them: a number, a bool or null, and whatever
    begins as a number does, so that quotes around an id mean the same whether it would be one or
    not. None for all else."""
    inner = text[1:-1]
    if text[:1] not in ("'", '"') or text != f"{text[0]}{inner}{text[0]}":
        return None
    return inner if _LIKE_A_NUMBER.fullmatch(inner) or not isinstance(free(Plain(inner)), str) else None


def free(value: Any) -> Any:
    """`value` of a section without declared types: unquoted numbers, bools and null get their type."""
    if isinstance(value, dict):
        return {key: free(item) for key, item in value.items()}
    if isinstance(value, list):
        return [free(item) for item in value]
    if isinstance(value, Plain):
        return _free_scalar(value)
    return value


def _free_scalar(plain: Plain) -> Any:
    if plain in _NULL:
        return None
    if plain in _BOOL:
        return _BOOL[plain]
    identifier = isinstance(plain, Typed) and _LIKE_AN_ID.fullmatch(plain)
    found = None if identifier else number(plain)
    return str(plain) if found is None else found
