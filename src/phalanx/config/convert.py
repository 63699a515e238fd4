"""From text to a field's type, and in words what that type expects.

Text that a type doesn't take comes back unchanged, so that validation refuses it with the value named.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from .text import Plain, is_null, number

_INTEGER = re.compile(r"[+-]?(?:0|[1-9][0-9]*)")
_BOOL = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def to_integer(value: Any) -> Any:
    """`10` and `-3`; no `1e3`, `010`, `0x10` or `1_000`, which could be meant as something else."""
    if isinstance(value, str) and _INTEGER.fullmatch(value) and len(value) < 4000:
        return int(value)
    if hasattr(value, "__index__") and not isinstance(value, bool):
        return operator.index(value)
    return value


def to_float(value: Any) -> Any:
    """JSON's numbers, `1e-3` included."""
    if isinstance(value, str):
        found = number(value)
        return value if found is None else float(found)
    return value


def to_bool(value: Any) -> Any:
    """true, yes, on, 1 and false, no, off, 0 in any case."""
    return _BOOL.get(value.lower(), value) if isinstance(value, str) else value


def to_text_list(value: Any) -> Any:
    """`a, b` and `[a, b]` are both lists, since a command line has only text."""
    if is_null(value):
        return ()
    if isinstance(value, str):
        inner = value.strip().removeprefix("[").removesuffix("]")
        return tuple(item.strip() for item in inner.split(",") if item.strip())
    if isinstance(value, (list, tuple)):
        return tuple(str(item) if isinstance(item, str) else item for item in value)
    return value


def to_environment(value: Any) -> Any:
    """Values of environment variables are text, `1`, `true` and `null` too."""
    if not isinstance(value, dict):
        return value
    return {key: _variable(item) for key, item in value.items()}


def _variable(value: Any) -> Any:
    return str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else value


_CONVERTERS: dict[Any, Callable[[Any], Any]] = {
    int: to_integer,
    float: to_float,
    bool: to_bool,
    tuple: to_text_list,
    dict: to_environment,
}


def convert(value: Any, annotation: Any) -> Any:
    """`value` as the first type of `annotation` that takes it."""
    types = [get_origin(member) or member for member, _ in _members(annotation)]
    if is_null(value) and (tuple not in types or NoneType in types):
        return None
    for kind in types:
        if kind in _CONVERTERS:
            converted = _CONVERTERS[kind](value)
            if converted is not value:
                return converted
    return str(value) if isinstance(value, Plain) else value


def _members(annotation: Any, metadata: Iterable[Any] = ()) -> list[tuple[Any, list[Any]]]:
    """The alternatives of a union, each with its bounds."""
    if get_origin(annotation) is Annotated:
        inner, *notes = get_args(annotation)
        flat = [part for note in notes for part in getattr(note, "metadata", None) or [note]]
        return _members(inner, [*metadata, *flat])
    if get_origin(annotation) in (Union, UnionType):
        return [pair for member in get_args(annotation) for pair in _members(member, metadata)]
    return [(annotation, list(metadata))]


_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple: "a list of texts",
    dict: "a mapping of names to texts",
    NoneType: "null",
}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def expected(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """What a field takes, in words: `an integer ≥ 1, auto or null`."""
    words = [_describe(member, notes) for member, notes in _members(annotation, metadata)]
    flat = [word for group in words for word in group]
    if all(get_origin(member) is Literal for member, _ in _members(annotation)):
        return "one of " + ", ".join(flat)
    return flat[0] if len(flat) == 1 else ", ".join(flat[:-1]) + " or " + flat[-1]


def _describe(kind: Any, metadata: Iterable[Any]) -> list[str]:
    if get_origin(kind) is Literal:
        return [str(choice) for choice in get_args(kind)]
    bounds = [
        f"{sign} {getattr(note, name)}"
        for note in metadata
        for name, sign in _BOUNDS.items()
        if getattr(note, name, None) is not None
    ]
    return [" ".join([_WORDS.get(get_origin(kind) or kind, str(kind)), " and ".join(bounds)]).strip()]
