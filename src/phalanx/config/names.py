"""Texts that land in scripts, directives, paths and environments: what they may hold."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# bash refuses to set them, and goes on.
_READONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"})
# Settings that are lines of shell, or the user's own; and others that may be empty.
LINES = frozenset({"before", "after", "exec_command", "training_cmd", "container.pre"})
_FREE = ("env", "params")
_MAY_BE_EMPTY = frozenset({"host_suffix", "config_name", "config_path", "config_file", "pipe_key", "exp_name"})


def texts(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every text of the settings (a list has several), with its dotted key; not those of `env` and `params`."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from () if prefix + name in _FREE else texts(value, f"{prefix}{name}.")
        else:
            for text in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(text, str):
                    yield prefix + name, text


def fault(key: str, text: str) -> str | None:
    """What is wrong with the text of a setting that is to be one line, and not empty."""
    said = f"{key.removeprefix('sbatch.')}={text!r}"
    if key not in LINES and any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        return f"{said}: expected one line of text, without line breaks and other control characters"
    if not text.strip() and key not in LINES | _MAY_BE_EMPTY:
        return f"{said} is empty: expected a text; to leave it unset write null, or leave it out"
    return None


def wrong_variable(name: str) -> str | None:
    """What is wrong with the name of a variable of the environment, if it can't be set."""
    if not _VARIABLE.fullmatch(name):
        return f"{name!r} can't be a variable's name: expected letters, digits and _, with no digit first"
    if name in _READONLY:
        return f"{name} is bash's own and can't be set: use another name"
    return None
