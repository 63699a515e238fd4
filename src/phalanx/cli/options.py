"""The command line: options, settings and `name=value` words up to the script; the rest is the script's."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config.exclusions import asks
from ..config.sbatch import OPTIONALS, SHORT
from ..config.table import FREE, RIVALS, canonical, keys, nearest, refused, sections
from ..config.text import Plain
from ..errors import UsageError, did_you_mean

_SETTING = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*=", re.ASCII)
_SHAPE = re.compile(r"(\d+)[xX](\d+|auto|gpu|cpu)", re.ASCII)
_SHORT = {"-c": "--config", "-j": "--shape", "-s": "--strategy", "-h": "--help"} | {
    letter: f"--{key}" for letter, key in SHORT.items()
}
_OWN = ("--config",)


@dataclass(frozen=True)
class Scanned:
    """A command line taken apart. `overrides` are (key, value) pairs in order; `flags` and `values` are the
    command's own options without dashes; `args` are the script's, untouched."""

    files: tuple[str, ...] = ()
    overrides: tuple[tuple[str, Any] | tuple[str, Any, str], ...] = ()
    flags: frozenset[str] = frozenset()
    values: Mapping[str, str] = field(default_factory=dict)
    script: str | None = None
    args: tuple[str, ...] = ()


def scan(argv: Collection[str], script: bool, flags: Collection[str] = (), valued: Collection[str] = ()) -> Scanned:
    """Take `argv` apart; the first word that is no option, option value or `name=value` is the script.

    `flags` are the names, without dashes, of the command's own valueless options; `help` is always one. `valued`
    are those of its options with a value.
    Raises UsageError for an unknown option, a missing value, or a script where there can be none.
    """
    scanner = _Scanner(list(argv), (*flags, "help"), tuple(valued))
    while scanner.rest:
        word = scanner.rest.pop(0)
        forced = word == "--"
        if not forced and len(word) > 1 and word.startswith("-"):
            scanner.option(word)
        elif not forced and _SETTING.match(word):
            key, _, value = word.partition("=")
            scanner.setting(word, key, value)
        else:
            return scanner.done(scanner.script(word, forced, script))
    return scanner.done(None)


@dataclass
class _Scanner:
    rest: list[str]
    known_flags: tuple[str, ...]
    known_values: tuple[str, ...] = ()
    files: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    overrides: list[tuple[str, str]] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)

    def done(self, script: str | None) -> Scanned:
        args = tuple(self.rest) if script is not None else ()
        self._refuse_rivals()
        return Scanned(tuple(self.files), tuple(self.overrides), frozenset(self.flags), self.values, script, args)

    def script(self, word: str, forced: bool, allowed: bool) -> str | None:
        if not allowed:
            raise UsageError(f"unexpected {word!r}: this command takes options and KEY=VALUE only")
        if forced and not self.rest:
            return None
        return self.rest.pop(0) if forced else word

    def option(self, word: str) -> None:
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            name, equals, value = self._short(word)
        given = value if equals else None
        if name == "--config":
            self.files.append(self._value(word, given))
        elif name == "--shape":
            self._shape(word, self._value(word, given))
        elif name[2:] in self.known_flags:
            self._flag(name, given)
        elif name[2:] in self.known_values:
            self.values[name[2:]] = self._value(word, given)
        else:
            self._setting(word, name, given)

    def _short(self, word: str) -> tuple[str, str, str]:
        """`-c FILE` and `-cFILE`; a letter's value may be attached, as is common."""
        name = _SHORT.get(word[:2])
        if name is None:
            raise UsageError(f"unknown option {word!r}: expected {', '.join(_SHORT)} or --KEY VALUE")
        return name, "=" if word[2:] else "", word[2:].removeprefix("=")

    def _value(self, option: str, given: str | None) -> str:
        if given is not None:
            return given
        if not self.rest or re.match(r"--?[A-Za-z]|--$", self.rest[0]):
            what = f"next is {self.rest[0]!r}" if self.rest else "it is the last word"
            raise UsageError(f"option {option} needs a value, but {what}: write {option} VALUE (or --KEY=VALUE)")
        return self.rest.pop(0)

    def _shape(self, option: str, text: str) -> None:
        match = _SHAPE.fullmatch(text)
        if match is None:
            raise UsageError(f"-j {text!r}: expected NODESxPROCS, such as 2x4 (use --nproc for one node)")
        for key, value in (("nodes", match[1]), ("nproc_per_node", match[2])):
            self.setting(option, key, value)

    def setting(self, word: str, key: str, value: str) -> None:
        """One more override. Of nodes and ranks, two different numbers on one command line are a slip."""
        name = _key(key)
        others = [said for other, said in self.overrides if _key(other) == name and said != value]
        if others and name in ("nodes", "nproc_per_node"):
            raise UsageError(f"{word} says {name}={value}, but the command line has {name}={others[-1]}: give one")
        self.overrides.append((key, value))

    def _refuse_rivals(self) -> None:
        last = {_key(name): Plain(value) for name, value in self.overrides}
        for group in RIVALS:
            said = [key.removeprefix("sbatch.") for key in group if asks(last.get(key))]
            if len(said) > 1:
                raise UsageError(f"{' and '.join(said)} exclude each other for Slurm: give one of them")

    def _flag(self, name: str, given: str | None) -> None:
        if given is not None:
            raise UsageError(f"option {name} takes no value, got {given!r}")
        self.flags.add(name[2:])

    def _setting(self, word: str, name: str, given: str | None) -> None:
        key, negated = _key(name[2:]), _key(re.sub(r"^no[-_]", "", name[2:]))
        if is_flag(key) or key.removeprefix("sbatch.") in OPTIONALS:
            self.overrides.append((key, "true" if given is None else given))
        elif key in keys() or _is_free(key):
            self.setting(name, key, self._value(name, given))
        elif not is_flag(negated):
            raise self._unknown(word, name)
        elif given is not None:
            raise UsageError(f"option {name} takes no value, got {given!r}: use --{negated}={given}")
        else:
            self.overrides.append((negated, "false"))

    def _unknown(self, word: str, name: str) -> UsageError:
        if name[2:].replace("-", "_") in sections():
            return UsageError(f"option {name} is a group of settings: use --{name[2:]}.KEY VALUE")
        own = [*_OWN, *(f"--{flag}" for flag in (*self.known_flags, *self.known_values))]
        setting = nearest(name[2:])
        hint = refused(name[2:]) or did_you_mean(name, own) or setting.replace("'", "'--", 1).replace("_", "-")
        return UsageError(f"unknown option {word!r}.{hint}")


def _key(name: str) -> str:
    return ".".join(canonical(tuple(name.split("."))))


def _is_free(key: str) -> bool:
    section, _, name = key.partition(".")
    return section in FREE and bool(name)


def is_flag(key: str) -> bool:
    """Options that stand alone: true or false, and sbatch's without a value."""
    return key in keys() and keys()[key].annotation in (bool, bool | None)
