"""What a YAML value means for an argparse argument, and how an argument's value is written as YAML.

Text is converted by the argument's own `type` and checked against its `choices`, as on a command line.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from ..config.text import is_null

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_BUILT_IN = (argparse._StoreAction, argparse._AppendAction)


def read_bool(text: str) -> bool:
    """`type=bool`: plain `bool("false")` would be True. Raises ValueError for any other word."""
    try:
        return _WORDS[text.lower()]
    except KeyError:
        raise ValueError(text) from None


read_bool.__name__ = "bool"  # argparse's messages name the type


def from_yaml(parser: argparse.ArgumentParser, actions: Sequence[argparse.Action], value: Any) -> Any:
    """The value of the `dest` that `actions` set, from what `read_file` gave for it.

    Raises argparse.ArgumentError if the value does not fit.
    """
    taking = [action for action in actions if action.nargs != 0]
    if taking:
        return _stored(parser, taking[0], value)
    first = actions[0]
    if isinstance(first, argparse._CountAction):
        return _count(first, value)
    if isinstance(first, argparse._AppendConstAction):
        return [_constant(actions, item) for item in _as_list(value)]
    return _constant(actions, value)


def _stored(parser: argparse.ArgumentParser, action: argparse.Action, value: Any) -> Any:
    if isinstance(action, argparse._ExtendAction):
        return _occurrence(parser, action, _as_list(value))
    if isinstance(action, argparse._AppendAction):
        return [_occurrence(parser, action, item) for item in _occurrences(action, value)]
    converted = _occurrence(parser, action, value)
    if isinstance(action, _BUILT_IN):
        return converted
    # The script's own class of action: only it knows what it does with a value.
    holder = argparse.Namespace(**{action.dest: action.default})
    action(parser, holder, converted)
    return getattr(holder, action.dest)


def _occurrences(action: argparse.Action, value: Any) -> list[Any]:
    """For `append` with several words each, `[1, 2]` is one occurrence and `[[1, 2], [3, 4]]` are two."""
    items = _as_list(value)
    several = action.nargs not in (None, "?")
    return [items] if several and not any(isinstance(item, list) for item in items) else items


def _occurrence(parser: argparse.ArgumentParser, action: argparse.Action, value: Any) -> Any:
    """What one use of the option on the command line would give."""
    if action.nargs in (None, "?") and not isinstance(action, argparse._ExtendAction):
        return _scalar(parser, action, value)
    items = _as_list(value)
    if isinstance(action.nargs, int) and len(items) != action.nargs:
        raise argparse.ArgumentError(action, f"expected {action.nargs} values, got {len(items)}")
    if action.nargs == "+" and not items:
        raise argparse.ArgumentError(action, "expected at least one value")
    return [_scalar(parser, action, item) for item in items]


def _scalar(parser: argparse.ArgumentParser, action: argparse.Action, value: Any) -> Any:
    if is_null(value):
        return None
    converted = parser._get_value(action, _text(action, value))
    parser._check_value(action, converted)
    return converted


def _text(action: argparse.Action, value: Any) -> str:
    if not isinstance(value, str):
        kind = "list" if isinstance(value, list) else "mapping"
        raise argparse.ArgumentError(action, f"expected one value, not a {kind}")
    return str(value)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _count(action: argparse.Action, value: Any) -> int:
    text = _text(action, value)
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentError(action, f"expected a count (0, 1, …), got {text!r}")
    return int(text)


def _constant(actions: Sequence[argparse.Action], value: Any) -> Any:
    """A flag's value: true or false, or the constant that one of the flags stores."""
    text = _text(actions[0], value)
    for action in actions:
        if action.const is not None and text == str(action.const):
            return action.const
    word = _WORDS.get(text.lower())
    if word is None:
        constants = [str(action.const) for action in actions if not isinstance(action.const, (bool, type(None)))]
        wanted = ", ".join(["true", "false", *constants])
        raise argparse.ArgumentError(actions[0], f"expected one of {wanted}, got {text!r}")
    if all(isinstance(action.const, (bool, type(None))) for action in actions):
        return word
    return actions[0].const if word else actions[0].default


def to_yaml(value: Any, words: Any) -> Any:
    """`value` as `from_yaml` reads it; `words` (what was given for it, or None) stands for unusual types."""
    if isinstance(value, (list, tuple)):
        return [to_yaml(item, None) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value) if words is None else words
