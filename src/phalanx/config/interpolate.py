r"""`${key}`, `${oc.env:VAR,default}` and `${now:%Y}` in the text of settings, after all layers are merged.

The syntax is OmegaConf's, so that its users' files read the same. `\${` stands for `${` itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

from ..errors import ConfigError
from ..shell import MARK
from .table import FREE, canonical, keys, nearest, sections
from .text import Plain, is_null
from .tree import Leaf, Path, Tree, find, grow, leaves, merge, show

# Settings that are shell text: an unknown `${X}` is the shell's there.
SHELL_TEXTS = ("before", "after", "exec_command", "training_cmd", "container.pre")

_OPENING = re.compile(r"(?P<escapes>\\*)\$\{")


def escape(text: str) -> str:
    r"""`text` with each `${` written so that it stays as it is."""
    return _OPENING.sub(lambda match: "\\" * (2 * len(match["escapes"]) + 1) + "${", text)


def split(text: str) -> list[tuple[bool, str]]:
    r"""The pieces of `text`: (True, what stands in `${…}`) and (False, literal text without escapes).

    n backslashes before `${` are n // 2 backslashes, and an odd one takes the meaning from `${`.
    Raises ConfigError if a `${` is not closed.
    """
    pieces: list[tuple[bool, str]] = []
    literal, start = "", 0
    while match := _OPENING.search(text, start):
        escapes = len(match["escapes"])
        literal += text[start : match.start()] + "\\" * (escapes // 2)
        start = match.end()
        if escapes % 2:
            literal += "${"
            continue
        end = _closing(text, start)
        pieces += [(False, literal)] if literal else []
        pieces.append((True, text[start:end]))
        literal, start = "", end + 1
    literal += text[start:]
    return pieces + ([(False, literal)] if literal or not pieces else [])


def _closing(text: str, start: int) -> int:
    depth = 1
    for index in range(start, len(text)):
        if text[index] == "}":
            depth -= 1
            if depth == 0:
                return index
        elif text.startswith("${", index):
            depth += 1
    raise ConfigError("'${' without '}'; write '\\${' for the text itself")


@dataclass
class Resolver:
    """Resolves a merged tree; `problems` collects what could not be."""

    tree: Tree
    environ: Mapping[str, str]
    now: datetime
    problems: list[str]
    _open: list[Path] = field(default_factory=list)
    _done: dict[Path, Any] = field(default_factory=dict)
    _failed: set[Path] = field(default_factory=set)

    def resolve(self) -> Tree:
        """The tree with every interpolation replaced; leaves that cannot be resolved are left out."""
        resolved: Tree | Leaf = {}
        for path, leaf in leaves(self.tree):
            try:
                branch = grow(self._leaf(path, leaf), leaf.origin)
            except ConfigError as error:
                self._report(error)
                continue
            for key in reversed(path):
                branch = {key: branch}
            resolved = merge(resolved, branch)
        return cast("Tree", resolved)

    def _report(self, error: ConfigError) -> None:
        """One problem, at the innermost setting; those that refer to it are not reported again."""
        culprit = self._open[-1]
        leaf = find(self.tree, culprit)
        if culprit not in self._failed and isinstance(leaf, Leaf):
            self.problems.append(f"{'.'.join(culprit)} = {show(leaf.value)} ({leaf.origin}): {error}")
        self._failed.update(self._open)
        self._open.clear()

    def _leaf(self, path: Path, leaf: Leaf) -> Any:
        if path in self._done:
            return self._done[path]
        chain = [*self._open, path]
        if path in self._open:
            names = " → ".join(".".join(each) for each in chain)
            raise ConfigError(f"settings refer to each other in a circle: {names}")
        self._open.append(path)
        if path in self._failed:
            raise ConfigError("already reported")
        self._done[path] = self._value(leaf.value)
        self._open.pop()
        return self._done[path]

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, tuple):
            return tuple(self._value(item) for item in value)
        if isinstance(value, dict):
            return {key: self._value(item) for key, item in value.items()}
        return value

    def _text(self, text: str) -> Any:
        if "${" not in text:
            return text
        if ".".join(self._open[-1]) in SHELL_TEXTS or text.startswith(MARK):
            return self._shell_text(text)
        kind = (
            Plain if isinstance(text, Plain) else str
        )  # what is put together from plain text is plain, from quoted text quoted
        pieces = split(text)
        if len(pieces) == 1 and pieces[0][0]:
            return self._expression(pieces[0][1], kind)
        return kind("".join(self._piece(*piece) for piece in pieces))

    def _shell_text(self, text: str) -> str:
        """`${X}` that is neither a setting nor `oc.env:` or `now:` stays as it is."""
        return "".join(
            self._piece(known, inner, shell=True) if not known or self._is_ours(inner) else f"${{{inner}}}"
            for known, inner in split(text)
        )

    def _is_ours(self, inner: str) -> bool:
        path = canonical(tuple(inner.split(".")))
        ours = ".".join(path) in keys() or find(self.tree, path) is not None
        return ours or inner.startswith(("oc.env:", "now:"))

    def _piece(self, interpolated: bool, text: str, shell: bool = False) -> str:
        if not interpolated:
            return text
        value = self._expression(text, Plain)
        if isinstance(value, str) and value.startswith(MARK):
            if not shell:
                raise ConfigError(f"${{{text}}} is shell text, and can be part of such only: write !sh here too")
            return value.removeprefix(MARK)
        if isinstance(value, (list, tuple, dict)) or is_null(value):
            what = "is unset" if is_null(value) else "is not a single value"
            raise ConfigError(f"${{{text}}} {what} and cannot be part of a text")
        return str(value).lower() if isinstance(value, bool) else str(value)

    def _expression(self, text: str, kind: type[str]) -> Any:
        name, colon, rest = text.partition(":")
        if colon and name == "oc.env":
            return self._environment(rest, kind)
        name = "".join(self._piece(*piece) for piece in split(text))
        if name.startswith("now:"):
            return kind(self.now.strftime(name.removeprefix("now:")))
        if ":" in name:
            raise ConfigError(f"unknown ${{{text}}}: expected ${{key}}, ${{oc.env:VAR}} or ${{now:FORMAT}}")
        return self._reference(name)

    def _environment(self, text: str, kind: type[str]) -> Any:
        name, comma, default = text.partition(",")
        name = name.strip()
        if name in self.environ:
            return kind(self.environ[name])
        if not comma:
            raise ConfigError(
                f"the environment variable {name!r} is not set; ${{oc.env:{name},DEFAULT}} gives a default"
            )
        return self._text(kind(default.strip()))

    def _reference(self, name: str) -> Any:
        path = canonical(tuple(name.split(".")))
        key = ".".join(path)
        if find(self.tree, path) is not None or key in keys() or key in sections():
            return self._at(path)
        hint = f" For the environment variable write ${{oc.env:{name}}}." if name in self.environ else ""
        near = nearest(name, (".".join(path) for path, _ in leaves(self.tree)))
        raise ConfigError(f"unknown ${{{name}}}: no such setting.{near}{hint} For the text itself: \\${{{name}}}")

    def _at(self, path: Path) -> Any:
        """The value at `path`: a section as a whole has its defaults too."""
        found = find(self.tree, path)
        if isinstance(found, Leaf):
            return self._leaf(path, found)
        prefix = ".".join(path)
        if prefix in keys() and prefix not in FREE:
            default = keys()[prefix].default
            if isinstance(default, (bool, int, float)):  # as if it had been written, so that text takes it too
                return Plain(str(default).lower() if isinstance(default, bool) else default)
            return default
        names = [key.removeprefix(f"{prefix}.") for key in keys() if key.startswith(f"{prefix}.")]
        return {name: self._at((*path, name)) for name in dict.fromkeys([*names, *(found or {})])}
