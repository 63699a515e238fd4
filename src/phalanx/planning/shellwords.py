"""Shell text as words, each with its own text and, where the shell evaluates nothing in it, its meaning."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

_PIECE = re.compile(
    r"(?P<gap>(?:[ \t]|\\\n)+)"
    r"|(?P<literal>'[^']*'|\\.|[^\s'\"\\$`|&;<>()\n#*?\[{~]+)"
    r"|(?P<redirect>&>>?|[<>]&?)"
    r"|(?P<shell>[$*?\[{~])"
    r"|(?P<operator>[;&|()\n])",
    re.DOTALL,
)
_PLAIN = re.compile(r"\"(?:[^\"\\$`]|\\.)*\"", re.DOTALL)
_NESTED = {'"': '"', "`": "`", "$(": ")", "${": "}"}  # what begins with these, and ends with those
_COMMENT, _UNKNOWN = "#", ""
_CASE = re.compile(r"(?:(?:if|then|elif|else|while|until|do|\{|!) )*case .+ in", re.DOTALL)


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
    for word in _read(text.strip()):
        if isinstance(word, str):
            return None
        words.append(word)
    return words


def commands(text: str) -> Iterator[list[ShellWord]]:
    """The simple commands of shell text, whatever stands between them (`;`, `&&`, `|`, parentheses,
    line breaks, comments), less what isn't run: the patterns of a `case`, and the words of an array
    that is nowhere expanded. What follows a quote that doesn't end is left out."""
    words: list[ShellWord] = []
    skipping, before = False, ""  # up to the next `)`
    for word in _read(text):
        if isinstance(word, ShellWord):
            skipping = skipping and word.text != "esac"
            words += [] if skipping else [word]
            if word.text == "in" and _CASE.fullmatch(join(words)):
                skipping, words = True, []
            before = ""
        elif skipping:
            skipping, before = word != ")", ""
        else:
            skipping = _names_only(words, word, text) or (before == ";" and word in (";", "&"))
            before = word
            if words:
                yield words
                words = []
    if words:
        yield words


def _names_only(words: list[ShellWord], operator: str, text: str) -> bool:
    """Whether `a=(` begins here, of which nothing is run, as far as the text tells."""
    array = re.fullmatch(r"(\w+)\+?=", words[-1].text) if operator == "(" and words else None
    return array is not None and f"${{{array[1]}[" not in text


def ends_unwaited(text: str) -> bool:
    """Whether the last command is one that the shell doesn't wait for (`a &`)."""
    pieces = [piece for piece in _read(text) if piece not in ("\n", _COMMENT)]
    return pieces[-1:] == ["&"] and pieces[-2:-1] not in (["&"], ["|"])


def join(words: list[ShellWord]) -> str:
    """The words as shell text."""
    return " ".join(word.text for word in words)


def _read(text: str) -> Iterator[ShellWord | str]:
    """Words, and what stands between them as plain strings: operators, a comment as `#`, and the
    empty string where the text isn't understood, which is its end."""
    word, plain, start = "", True, 0
    while start < len(text):
        kind, end = _piece(text, start, bool(word))
        piece, start = text[start:end], end
        if kind in ("literal", "quoted", "shell", "redirect"):
            word += piece
            plain = plain and kind in ("literal", "quoted")
            continue
        if word:
            yield _word(word, plain)
        word, plain = "", True
        if kind == "gap":
            continue
        yield {"comment": _COMMENT, "unknown": _UNKNOWN}.get(kind, piece)
    if word:
        yield _word(word, plain)


def _piece(text: str, start: int, within: bool) -> tuple[str, int]:
    """What begins at `start`, within a word or not, and where it ends."""
    if text[start] == "#":
        return ("literal", start + 1) if within else ("comment", (text + "\n").index("\n", start))
    opening = next((opening for opening in _NESTED if text.startswith(opening, start)), None)
    if opening is not None:
        end = _closed(text, start + len(opening), _NESTED[opening])
        if end is None:
            return "unknown", len(text)
        return ("quoted" if _PLAIN.fullmatch(text, start, end) else "shell"), end
    found = _PIECE.match(text, start)
    return (str(found.lastgroup), found.end()) if found else ("unknown", len(text))


def _closed(text: str, start: int, closing: str) -> int | None:
    """Where the quote or expansion around `start` ends, with all that stands in it; None if it
    doesn't."""
    place: int | None = start
    while place is not None and place < len(text):
        letter = text[place]
        opening = next((opening for opening in _NESTED if text.startswith(opening, place)), None)
        if letter == closing:
            return place + 1
        if letter == "\\":
            place += 2
        elif letter == "'" and closing != '"':
            place = text.find("'", place + 1) + 1 or None
        elif letter == "(" and closing == ")":
            place = _closed(text, place + 1, ")")
        elif opening is not None:
            place = _closed(text, place + len(opening), _NESTED[opening])
        else:
            place += 1
    return None


def _word(text: str, plain: bool) -> ShellWord:
    return ShellWord(text, "".join(shlex.split(text)) if plain else None)
