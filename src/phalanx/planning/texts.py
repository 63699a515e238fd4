"""Whether the texts of settings and program may stand where a plan puts them: in scripts, paths and arguments."""

from __future__ import annotations

from collections.abc import Iterator

from .. import secret
from ..config import JobConfig, hidden
from ..config.names import fault, texts
from ..errors import PlanError
from ..shell import Sh, exports, word
from .program import Program
from .shellwords import split

_TELLING = 8  # letters of a secret by which a copy of it is known


def check(config: JobConfig, program: Program) -> None:
    """Raise PlanError for text that would break a line or be no name; and for a secret that would be written down."""
    for key, text in texts(config.model_dump()):
        wrong = fault(key, text)
        if wrong is not None:
            raise PlanError(wrong)
    for name, text in config.env.items():
        if "\0" in text:
            raise PlanError(f"env.{name}: expected text without the character NUL")
    for key, text in _shell_values(config):
        if len(split(exports({"A": Sh(text)})[0]) or ()) != len(("export", "A=…")):
            raise PlanError(
                f"{key}: the shell text {text!r} is not one word within double quotes, where it is put: close what is "
                "open in it, and leave quotes around the whole of it out"
            )
    known = {**hidden.proxies(config), **hidden.params(config), **secret.only(config.env)}
    for key, text in _written(config, program):
        copied = next((name for name, value in known.items() if len(value) >= _TELLING and value in text), None)
        refuse_secret(key, text, f"the value of {copied}" if copied else None)


def refuse_secret(where: str, text: str, known: str | None = None) -> None:
    """Raise PlanError for a secret in text that is written down."""
    found = known or secret.within(text)
    if found is not None:
        raise PlanError(
            f"{where} holds {found}, which scripts, plans and process lists would show: put it into env "
            "(such as env.MY_TOKEN), which travels in the environment alone, and refer to it as $MY_TOKEN"
        )


def _shell_values(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Settings whose value is shell text."""
    values = {**{f"env.{name}": text for name, text in config.env.items()}, "tmpdir": config.tmpdir}
    values |= {f"proxy.{name}": text for name, text in config.proxy.model_dump().items()}
    for key, text in values.items():
        if text and isinstance(found := word(text), Sh):
            yield key, found.text


def _written(config: JobConfig, program: Program) -> Iterator[tuple[str, str]]:
    """What stands in the files of a run or in the command lines of its processes."""
    yield from hidden.open_texts(config)
    words = [arg.text if isinstance(arg, Sh) else arg for arg in program.args]
    yield "an argument of the script", " ".join(words)
