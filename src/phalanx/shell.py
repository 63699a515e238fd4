"""Command lines as words, quoted by type: literal text is quoted, shell text is left as it is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from . import secret


@dataclass(frozen=True)
class Sh:
    """Shell text, such as `"$SLURM_NODEID"`: it reaches the shell unquoted and is evaluated there."""

    text: str


Word = str | Sh

MARK = "!sh "  # how a setting begins whose value is shell text: `!sh $HOME/x`, in YAML as a tag


def word(setting: str) -> Word:
    """A setting's text as what it means."""
    return Sh(setting.removeprefix(MARK)) if setting.startswith(MARK) else setting


def quote(word: Word) -> str:
    """One word as a POSIX shell reads it back."""
    return word.text if isinstance(word, Sh) else shlex.quote(word)


def render(words: Iterable[Word]) -> str:
    """The words as one line of shell."""
    return " ".join(quote(word) for word in words)


def layout(words: Iterable[Word]) -> str:
    """The words as shell text of one option a line, for long commands that people read."""
    text = ""
    for word in map(quote, words):
        begins = word == "bash" or (word.startswith(("-", "$(", "/")) and word not in ("-m", "-c", "--"))
        text += (" \\\n  " if begins and text else " " if text else "") + word
    return text


def exports(variables: Mapping[str, Word]) -> list[str]:
    """`export NAME=value` for each; shell text stands in double quotes, all else as it is."""
    return [f"export {name}={_value(value)}" for name, value in variables.items()]


def _value(value: Word) -> str:
    if isinstance(value, str):
        return shlex.quote(value)
    # As an assignment has it: in the quotes that keep the text one word a shell leaves `~` alone.
    home = re.match(r"~[A-Za-z_][\w.-]*(?:/|$)", value.text)
    other = home[0] if home else ""
    rest = re.sub(r"(^|:)~(?=/|:|$)", r"\1$HOME", value.text[len(other) :])
    return f'{other}"{rest}"'


def required(names: Iterable[str], failed: str = "") -> list[str]:
    """Lines that end a script, after the line `failed`, where one of the variables isn't set."""
    checks = [f"[ -n \"${{{name}+set}}\" ] || missing+=' {name}'" for name in names]
    if not checks:
        return []
    say = "error: this script holds no secrets, and the environment lacks$missing: set it before sbatch"
    return [
        "# Secrets, from the environment alone",
        "missing=",
        *checks,
        'if [ -n "$missing" ]; then',
        f'  echo "{say}" >&2',
        *([f"  {failed}"] if failed else []),
        "  exit 2",
        "fi",
    ]


def evaluate(value: Word) -> str:
    """The text that a shell makes of it, here and now."""
    if isinstance(value, str):
        return value
    import subprocess

    command = ["bash", "-c", f'x={_value(value)}; printf %s "$x"']
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def script(words: Iterable[Word], environment: Mapping[str, Word], folder: str) -> str:
    """A small shell script that runs `words` in `folder` with `environment` on top of its own."""
    own = exports(secret.without(environment))
    needed = required(secret.only(environment))
    lines = ["#!/bin/bash", f"cd {shlex.quote(folder)} || exit", *needed, *own, f"exec {render(words)}", ""]
    return "\n".join(lines)
