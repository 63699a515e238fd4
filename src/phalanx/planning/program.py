"""What ranks run: a Python script with arguments, or the shell text of `training_cmd`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from ..shell import Sh, Word
from . import launch_words
from .hidden_launch import Around, hidden_in
from .launch_words import Uncertain
from .shellwords import ShellWord, join, split

_PYTHON = re.compile(r"python[0-9.]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class Program:
    """`script` is None where `args` are a whole command; shell text among `args` is evaluated on the nodes.

    With `late_script` the first of `args` is a script whose path only the job's shell knows. `python` is the
    interpreter that the command names, `environment` what stands in front of it. `said` are settings that a launcher's
    words in the command mean; `refusal` is why they couldn't be understood.
    """

    script: str | None
    args: tuple[Word, ...] = ()
    late_script: bool = False
    python: str | None = None
    environment: Mapping[str, Word] = field(default_factory=dict)
    said: Mapping[str, str] = field(default_factory=dict)
    refusal: str | None = None

    @property
    def name(self) -> str:
        """The name of runs of this program that have no other."""
        script = self.script
        if self.late_script and isinstance(self.args[0], Sh):
            script = self.args[0].text.strip("\"'")
        stem = PurePath(script).stem if script else ""
        return "run" if not stem or "$" in stem or "`" in stem else stem


def from_training_cmd(text: str, around: Around | None = None) -> Program:
    """A command as shell text; one that starts a `.py` file is that script with arguments, and one that starts it by
    a launcher (`torchrun`, `srun`, …) is taken apart into both.

    Anything else, and a list of commands (`a && b`, `a | tee log`), is run as a whole, once a rank; it ends
    with the first command that fails, so that an `echo` at its end hides nothing.
    """
    words = split(text)
    if words is None:
        return _once_a_rank(text, around)
    environment, words = _assignments(words)
    try:
        if words and launch_words.is_launcher(words):
            return _launched(words, environment, around)
    except Uncertain as error:
        return as_command(text, str(error))
    literal = {name: value for name, value in environment.items() if isinstance(value, str)}
    found = _script(words) if len(literal) == len(environment) else None  # a rank's own variables may stand in others
    return replace(found, environment=literal) if found else _once_a_rank(text, around)


def _once_a_rank(text: str, around: Around | None) -> Program:
    return as_command(text, _hidden(text, around))


def _hidden(text: str, around: Around | None) -> str | None:
    """Why shell text can't be run once a rank: it starts a launcher. None if none is seen in it."""
    name = hidden_in(text, around)
    return launch_words.refusal(name, "it stands among other commands") if name else None


def interpreter_of(training_cmd: str | None, python: str) -> str:
    """What means the `python` on PATH, in the words that the user wrote."""
    names = (PurePath(word.bare).name for word in split(training_cmd or "") or [])
    name = next((name for name in names if name == python or name in launch_words.BY_PYTHON), None)
    if name is None:
        return f"the ranks' interpreter is {python}"
    return f"training_cmd starts {name}{'' if name == python else f', whose ranks run by the {python} on PATH'}"


def as_command(text: str, refusal: str | None = None) -> Program:
    """The text as it is, once a rank."""
    return Program(None, ("bash", "-eo", "pipefail", "-c", text.strip()), refusal=refusal)


def _assignments(words: list[ShellWord]) -> tuple[dict[str, Word], list[ShellWord]]:
    """The variables in front of a command, and the rest."""
    found: dict[str, Word] = {}
    for index, word in enumerate(words):
        match = _ASSIGNMENT.fullmatch(word.text)
        if match is None:
            return found, words[index:]
        value = word.literal.partition("=")[2] if word.literal is not None else None
        found[match[1]] = Sh(match[2].strip('"')) if value is None else value
    return found, []


def _script(words: list[ShellWord]) -> Program | None:
    """The script that the words start, by a Python or by its name."""
    python = None
    if words and words[0].literal is not None and _PYTHON.fullmatch(PurePath(words[0].literal).name):
        python, words = words[0].literal, words[1:]
        words = words[1:] if words and words[0].literal == "-u" else words
    if not words or not words[0].bare.endswith(".py") or words[0].bare.startswith("-"):
        return None
    script, rest = words[0], (Sh(join(words[1:])),) if words[1:] else ()
    if script.literal is None:
        return Program(None, (Sh(script.text), *rest), late_script=True, python=python)
    return Program(script.literal, rest, python=python)


def _launched(words: list[ShellWord], environment: dict[str, Word], around: Around | None) -> Program:
    """The program behind a launcher's words. Raises Uncertain."""
    call = launch_words.take_apart(words)
    _refuse_more(words[0], call.words)
    if call.module:
        found = as_command(f"{call.python or 'python'} -m {join(call.words)}")
    elif call.script_only and not call.words[0].bare.endswith(".py"):
        found = _named_script(words[0], call.words)
    elif call.words[0].text.startswith("$") and call.words[1:] and _PYTHON.fullmatch(call.words[1].bare):
        raise Uncertain(_late_options(words[0], call.words[0]))
    else:
        found = _script(call.words) or as_command(join(call.words))
    hidden = _hidden(join(call.words), around) if found.script is None and not found.late_script else None
    if hidden is not None:
        raise Uncertain(hidden)
    python = found.python or call.python
    return replace(found, python=python, environment={**environment, **call.environment}, said=call.said)


def _refuse_more(launcher: ShellWord, words: list[ShellWord]) -> None:
    """Raise Uncertain for what belongs to the whole launch, and would be done by each rank."""
    for word in words:
        if word.bare == ":" and re.search(r"(mpi\w*|srun|prun|orterun)\b", launcher.bare):
            raise Uncertain(launch_words.refusal(launcher.bare, "it starts several programs"))
        alike = word.text in ("2>&1", "</dev/null")  # the same in each rank as around them all
        if word.literal is None and re.match(r"\d*(&>|[<>])", word.text) and not alike:
            why = f"each rank would redirect its output or input ({word.text}): set output, or leave it out"
            raise Uncertain(launch_words.refusal(launcher.bare, why))


def _named_script(launcher: ShellWord, words: list[ShellWord]) -> Program:
    """A script without the ending of one, for a launcher that takes any file; a variable in its place
    may also hold options. Raises Uncertain."""
    rest = (Sh(join(words[1:])),) if words[1:] else ()
    if words[0].literal is not None:
        return Program(words[0].literal, rest)
    if any(word.bare.endswith(".py") or word.bare in ("-m", "--module") for word in words[1:]):
        raise Uncertain(_late_options(launcher, words[0]))
    return Program(None, (Sh(words[0].text), *rest), late_script=True)


def _late_options(launcher: ShellWord, variable: ShellWord) -> str:
    why = f"its options in {variable.text} are known in the job only: write them out"
    return launch_words.refusal(launcher.bare, why)
