"""A simple command as words, each with its shell text and, where the shell evaluates nothing in it, its meaning."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

_PIECE = re.compile(
    r"(?P<gap>(?:[ \t]|\\\n)+)"
    r"|(?P<literal>'[^']*'|\\.|[^\s'\"\\$`|&;<>()\n#*?\[{~]+)"
    r"|(?P<quoted>\"(?:[^\"\\$`]|\\.)*\")"
    r"|(?P<shell>\"(?:[^\"\\]|\\.)*\"|\$\{[^}]*\}|\$\([^()]*\)|`[^`]*`|\$|[*?\[{~#])"
    r"|(?P<redirect>&>>?|[<>]&?)",
    re.DOTALL,
)


@dataclass(frozen=True)
class ShellWord:
    """`text` as it was written; `literal` is what it means, or None if only the shell knows."""

    text: str
    literal: str | None

    @property
    def bare(self) -> str:
        """Without quotes, for a look at how it begins and ends."""
        return self.literal if self.literal is not None else re.sub(r"[\"']", "", self.text)


def split(text: str) -> list[ShellWord] | None:
    """The words of one simple command, redirections among them; None if it is more than that (`a && b`, `a | b`,
    several lines, a comment) or not understood."""
    words: list[ShellWord] = []
    word, plain, start = "", True, 0
    text = text.strip()
    while start < len(text):
        piece = _PIECE.match(text, start)
        if piece is None or (piece["shell"] == "#" and not word):
            return None
        start = piece.end()
        if piece["gap"] is not None:
            words += [_word(word, plain)] if word else []
            word, plain = "", True
        else:
            word += piece[0]
            plain = plain and ((piece["literal"] or piece["quoted"]) is not None or piece["shell"] == "#")
    return [*words, _word(word, plain)] if word else words


def _word(text: str, plain: bool) -> ShellWord:
    return ShellWord(text, "".join(shlex.split(text)) if plain else None)


def join(words: list[ShellWord]) -> str:
    return " ".join(word.text for word in words)
