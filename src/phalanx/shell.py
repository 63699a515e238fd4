"""Command lines as words, quoted by type: literal text is quoted, shell text is left as it is."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sh:
    """Shell text, such as `"$SLURM_NODEID"`: it reaches the shell unquoted and is evaluated there."""

    text: str


Word = str | Sh


def quote(word: Word) -> str:
    """One word as a POSIX shell reads it back."""
    return word.text if isinstance(word, Sh) else shlex.quote(word)


def render(words: Iterable[Word]) -> str:
    """The words as one line of shell."""
    return " ".join(quote(word) for word in words)


def script(words: Iterable[Word], environment: Mapping[str, str], folder: str) -> str:
    """A small shell script that runs `words` in `folder` with `environment` on top of its own."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    return "\n".join(["#!/bin/sh", f"cd {shlex.quote(folder)} || exit", *exports, f"exec {render(words)}", ""])
