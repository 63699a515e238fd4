"""What ranks run: a Python script with arguments, or the shell text of `training_cmd`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

from .shell import Sh, Word

# `python -u train.py …`: the launcher has the interpreter already.
_SCRIPT = re.compile(
    r"\s*(?:python[0-9.]*\s+(?:-u\s+)?)?(?P<script>[^\s'\"$`\\|&;<>()]+\.py)(?=\s|$)(?P<rest>.*)", re.DOTALL
)
_OPERATORS = re.compile(r"&&|\|\||[;|\n]")


@dataclass(frozen=True)
class Program:
    """`script` is None where `args` are a whole command; shell text among `args` is evaluated on the nodes."""

    script: str | None
    args: tuple[Word, ...] = ()

    @property
    def name(self) -> str:
        """The name of runs of this program that have no other."""
        return (PurePath(self.script).stem if self.script else "") or "run"


def from_training_cmd(text: str) -> Program:
    """A command as shell text; one that starts with a `.py` file is that script with arguments.

    Anything else, and a list of commands (`a && b`, `a | tee log`), is run as a whole, once a rank; it ends
    with the first command that fails, so that an `echo` at its end hides nothing.
    """
    match = _SCRIPT.fullmatch(text.strip())
    if match is None or _OPERATORS.search(match["rest"]):
        return Program(None, ("bash", "-eo", "pipefail", "-c", text.strip()))
    rest = match["rest"].strip()
    return Program(match["script"], (Sh(rest),) if rest else ())
