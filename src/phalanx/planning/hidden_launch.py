"""Launchers within a command that is run once a rank: each rank would start a world of its own.

Looked for in all simple commands of the text, in the words of programs that start others (`exec`,
`time`, `singularity exec`, `conda run`, …), in what shells are given (`bash -c "…"`, `eval`,
here-documents, a script file) and behind variables whose text is known.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from .launch_words import is_launcher
from .shellwords import ShellWord, commands, split

_SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
_RESERVED = ("if", "then", "elif", "else", "while", "until", "do", "{", "!")
# Programs that only name another: it isn't started.
_NAMING = re.compile(
    r"echo|printf|logger|:|true|false|type|which|hash|pip3?|module|ml|spack|[ef]?grep|sed|awk|cat"
    r"|ls|rm|cp|mv|mkdir|touch|tee|p?kill|killall|pgrep|man|git|apt(-get)?|yum|dnf|brew|\[\[?|test"
    r"|declare|local|readonly|unset|for|case|function|cd|tar|find|make|python[\w.]*|pytest"
    r"|export|alias|pushd|head|tail|wc|diff|file|ldd|ln|install|chmod|rsync|scp|wget|curl|unzip"
    r"|squeue|sinfo|sacct|scancel|scontrol"
)
# These start another with such a word only: `conda install deepspeed -c x` doesn't.
_BY_RUN = ("conda", "mamba", "micromamba", "uv", "poetry", "pipenv", "pixi", "pdm", "hatch")
_AMBIGUOUS = ("deepspeed", "composer", "prun")  # also a package's name, or a mode's
_OF_SCRIPTS = ("deepspeed", "composer", "torchrun")  # they start a script, and no `python script`
_PYTHON = re.compile(r"python[\d.]*")
# Options whose value names something: an environment, a package, a way that the program has.
_NAMED_BY = re.compile(
    r"--(name|prefix|with|launcher|backend|strategy|plugin|scheduler|mode|output|out"
    r"|optimizer|cmd)"
)
_HEREDOC = re.compile(r"(?<!<)<<(?!<)-?\s*(['\"\\]?)(\w+)")
_ASSIGNED = re.compile(
    r"(?:export[ \t]+)?([A-Za-z_]\w*)=(\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s;&|]*)", re.ASCII | re.DOTALL
)
_LARGE = 1 << 20  # bytes of a file that is no script
_DEEP = 5


@dataclass(frozen=True)
class Around:
    """What is known around a command: the folder it runs in, and texts of variables."""

    folder: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def assigned(text: str) -> dict[str, str]:
    """Variables that lines of shell set, as far as the text tells."""
    return {match[1]: _unquoted(match[2]) for match in _ASSIGNED.finditer(text)}


def hidden_in(text: str, around: Around | None = None, depth: int = 0) -> str | None:
    """The name of a launcher that the shell text would start, and of the file that does; None if
    none is seen."""
    around = around or Around()
    around = Around(around.folder, {**around.variables, **assigned(text)})
    text, given = _without_documents(text)
    parts = [hidden_in(body, around, depth + 1) for body in given if depth < _DEEP]
    for words in commands(text):
        parts.append(_in_command(_resolved(_bare(words), around), around, depth))
    return next((name for name in parts if name), None)


def _in_command(words: list[ShellWord], around: Around, depth: int) -> str | None:
    if not words:
        return None
    name = _name(words[0])
    if is_launcher(words):
        return words[0].bare
    if _NAMING.fullmatch(name) or (name == "command" and words[1:2] and words[1].bare == "-v"):
        return None
    if name in _BY_RUN and not {"run", "exec"} & {word.bare for word in words[1:3]}:
        return None
    for place in range(1, len(words) - 1):
        word = words[place]
        named = "=" in word.bare or _NAMED_BY.fullmatch(words[place - 1].bare)
        if not named and is_launcher(words[place:]) and _certain(words[place:]):
            return word.bare
        python = _PYTHON.fullmatch(_name(word)) and not is_launcher(words[place + 1 :])
        if python or word.bare.endswith(".py"):
            break  # what follows are the script's own words
    for file, text in _shell_texts(words, around) if depth < _DEEP else ():
        found = hidden_in(text, around, depth + 1)
        if found:
            return f"{found} in {file}" if file else found
    return None


def _certain(words: list[ShellWord]) -> bool:
    """Whether words that begin with a launcher's name also go on as its own do."""
    if _name(words[0]) in _OF_SCRIPTS:
        before = list(itertools.takewhile(lambda word: not _begins_program(word.bare), words[1:]))
        if any(_PYTHON.fullmatch(_name(word)) for word in before):
            return False  # `conda run -n deepspeed python train.py`
    if _name(words[0]) not in _AMBIGUOUS:
        return True
    return any(_begins_program(word.bare) for word in words[1:])


def _begins_program(word: str) -> bool:
    return word.endswith(".py") or word in ("-m", "--module", "--no-python", "--no_python")


def _shell_texts(words: list[ShellWord], around: Around) -> Iterator[tuple[str, str]]:
    """What shells in a command are given to run: the file's name, empty without one, and the
    text."""
    name = _name(words[0])
    if name == "eval":
        yield "", " ".join(_unquoted(word.text) for word in words[1:])
    if name in ("source", ".") and len(words) > 1:
        yield words[1].bare, _of_file(words[1], around)
    if name.endswith(".sh") or "/" in words[0].bare:
        yield words[0].bare, _of_file(words[0], around)
    for place, word in enumerate(words):
        if _name(word) not in _SHELLS:
            continue
        rest = words[place + 1 :]
        while rest and rest[0].bare.startswith("-"):
            option = rest.pop(0).bare
            if re.fullmatch(r"-[a-z]*c", option) and rest:
                yield "", _unquoted(rest.pop(0).text)
                return
            if re.fullmatch(r"-[a-z]*o", option):
                rest = rest[1:]
        if rest:
            yield rest[0].bare, _of_file(rest[0], around)
        return


def _of_file(word: ShellWord, around: Around) -> str:
    """The text of a shell script that can be read here; empty for all else."""
    if around.folder is None or word.literal is None:
        return ""
    path = around.folder / word.literal
    try:
        if not path.is_file() or path.stat().st_size > _LARGE:
            return ""
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    first = text.partition("\n")[0]
    shell = re.search(rf"\b({'|'.join(_SHELLS)})\b", first) if first.startswith("#!") else path.suffix != ".py"
    return text if shell else ""


def _bare(words: list[ShellWord]) -> list[ShellWord]:
    """Without what stands in front of a command: the shell's own words, and variables."""
    while words and (words[0].text in _RESERVED or re.match(r"[A-Za-z_]\w*\+?=", words[0].text)):
        words = words[1:]
    return words


def _resolved(words: list[ShellWord], around: Around) -> list[ShellWord]:
    """With the words of a variable in its place."""
    found: list[ShellWord] = []
    for word in words:
        match = re.fullmatch(r"\$\{?(\w+)\}?", word.bare)
        text = around.variables.get(match[1]) if match else None
        if text is None:
            found.append(word)
        elif word.text.startswith('"'):
            found.append(ShellWord(shlex.quote(text), text))
        else:
            found += split(text) or []
    return found


def _without_documents(text: str) -> tuple[str, list[str]]:
    """The text without its here-documents, and those of them that a shell reads."""
    kept: list[str] = []
    given: list[str] = []
    lines = iter(text.replace("\\\n", " ").split("\n"))
    for line in lines:
        kept.append(line)
        for match in _HEREDOC.finditer(line):
            body = []
            for inner in lines:
                if inner.lstrip("\t") == match[2]:
                    break
                body.append(inner)
            if re.search(rf"(?<![\w.-])({'|'.join(_SHELLS)})(?![\w.-])", line[: match.start()]):
                given.append("\n".join(body))
    return "\n".join(kept), given


def _name(word: ShellWord) -> str:
    return PurePath(word.bare).name


def _unquoted(text: str) -> str:
    """What a quoted text means to a shell that reads it once more."""
    if text.startswith('"') and text.endswith('"') and len(text) > 1:
        return re.sub(r"\\([\"\\$`])", r"\1", text[1:-1].replace("\\\n", ""))
    return text[1:-1] if text.startswith("'") and text.endswith("'") and len(text) > 1 else text
