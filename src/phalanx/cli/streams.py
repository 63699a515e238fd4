"""stdout and stderr that take every character, whatever their encoding, and what is left where they take nothing."""

from __future__ import annotations

import codecs
import io
import os
import sys
from pathlib import Path

_HANDLER = "phalanx-plain"
_PLAIN = {
    "─": "-",
    "–": "-",
    "—": "-",
    "→": "->",
    "…": "...",
    "µ": "u",
    "·": "*",
    "×": "x",
    "“": '"',
    "”": '"',
    "’": "'",
}


def prepare() -> None:
    """What an encoding hasn't is written as plain text, or escaped; a closed stream is one that nobody reads."""
    codecs.register_error(_HANDLER, _in_plain_text)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            nobody = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the process's life
            setattr(sys, name, nobody)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def _in_plain_text(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    character = error.object[error.start]
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file's name that was no text: as it was
        return bytes([code - 0xDC00]), error.start + 1
    return _PLAIN.get(character) or character.encode("ascii", "backslashreplace").decode(), error.start + 1


def refused(error: OSError) -> bool:
    """Whether it is stdout that took no more, and not a file; then nothing more is written to it.

    A failed write empties Python's buffer and names no file, so what is left is to try again: with a line break, which
    does no harm before a traceback.
    """
    if error.filename is not None:
        return False
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as again:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return again.errno == error.errno
    return False
