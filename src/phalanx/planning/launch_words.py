"""A launcher's command line as people have it in their batch scripts: what it starts, and the settings that it means.

Ranks are started by one launcher, so `torchrun --nproc_per_node 2 t.py` run as a command, once a rank, would make as
many worlds as there are ranks. Where every option is understood the words become settings; else they are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from ..shell import Sh, Word
from .shellwords import ShellWord, split

_MPI = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun")
BY_PYTHON = ("torchrun", "accelerate", "horovodrun", "deepspeed")
"""Launchers that are Python programs, and start ranks by the interpreter that they have."""
_NAMES = ("torchrun", "srun", "horovodrun", "deepspeed", *_MPI)
_OLD = "torch.distributed.launch"
_MODULES = {
    "torch.distributed.run": "torchrun",
    _OLD: _OLD,
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "horovod.runner.launch": "horovodrun",
}
_BY_FILE = ("torchrun", "accelerate-launch", "deepspeed", "horovodrun")  # that Python may be given
# Those that have no counterpart here.
_OTHERS = ("jsrun", "aprun", "composer", "torchx", "ibrun", "lrun", "prterun", "mpirun_rsh", "sbatch", "salloc")
_MPI_OF = re.compile(r"mpi(run|exec)\.\w+")  # Debian's names: mpirun.openmpi
# Programs that are launchers with such a word only.
_BY_WORD = {
    "accelerate": ("launch",),
    "ray": ("job", "start", "submit", "exec", "up"),
    "colossalai": ("run",),
    "lightning": ("run",),
    "fabric": ("run",),
    "flux": ("run", "submit"),
    "phalanx": ("run", "submit", "test"),
}
# `$(which torchrun)`, `${TORCHRUN:-torchrun}`
_LOOKED_UP = re.compile(r"(?:\$\(|`)(?:which|command -v|type -p) (\S+?)[)`]|\$\{\w+:?-([\w/.-]+)\}")
# Variables that say what the settings say anyway.
_NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
_RANKS = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE")
_TASKS = ("SLURM_NTASKS", "SLURM_NPROCS")


class Uncertain(Exception):
    """A launcher's words that aren't understood; the text says which, and what to write instead."""


@dataclass
class Call:
    """What a launcher starts (`words`, a script unless `module`), by which Python, and the settings it means."""

    words: list[ShellWord]
    said: dict[str, str] = field(default_factory=dict)
    environment: dict[str, Word] = field(default_factory=dict)
    python: str | None = None
    module: bool = False
    script_only: bool = False


def is_launcher(words: list[ShellWord]) -> bool:
    """Whether a command begins with a launcher."""
    return _named(words) is not None


def _named(words: list[ShellWord]) -> tuple[str, list[ShellWord]] | None:
    """The launcher's name and its words; one that is called as a module of Python's goes by the same name."""
    name, texts = _program(words[0]), [word.literal or "" for word in words]
    if name in (*_NAMES, *_OTHERS) or _MPI_OF.fullmatch(name):
        return name, words[1:]
    if name == "accelerate-launch":
        return "accelerate", words[1:]
    if texts[1:2] and texts[1] in _BY_WORD.get(name, ()):
        return name, words[2 if name == "accelerate" else 1 :]
    return _by_python_itself(words) if name.startswith("python") else None


def _program(word: ShellWord) -> str:
    """The name of the program that a word means, also where only the shell knows its folder."""
    looked_up = _LOOKED_UP.fullmatch(word.bare)
    return PurePath(looked_up[1] or looked_up[2] if looked_up else word.bare).name


def _by_python_itself(words: list[ShellWord]) -> tuple[str, list[ShellWord]] | None:
    """A launcher that Python starts, as a module or by its file."""
    place = 1
    while place < len(words) and (option := words[place].bare).startswith("-"):
        module = re.fullmatch(r"-[bBdEiIOPqsSuv]*m(.*)", option)
        if module:
            place += not module[1]
            name = module[1] or (words[place].literal if place < len(words) else None) or ""
            rest = words[place + 1 :]
            if name in ("accelerate", "phalanx"):
                return _named([ShellWord(name, name), *rest])
            return (_MODULES[name], rest) if name in _MODULES else None
        place += 2 if option in ("-W", "-X") else 1
    found = _program(words[place]) if place < len(words) else ""
    return (found, words[place + 1 :]) if found in _BY_FILE else None


def refusal(name: str, why: str) -> str:
    return (
        f"training_cmd starts ranks by {name}, and would do so once in each rank; {why}. Give the script and its "
        "arguments alone (training_cmd: train.py --epochs 3), with launcher, nodes and nproc_per_node as settings; or "
        "put your own lines into exec_command, in place of the launch"
    )


def take_apart(words: list[ShellWord]) -> Call:
    """The call that a launcher's words mean. Raises Uncertain."""
    name, rest = _named(words) or ("", words)
    try:
        if words[0].literal is None:
            raise Uncertain("its path is known in the job only")
        if name == "srun":
            return _srun(rest)
        if name in _MPI or _MPI_OF.fullmatch(name):
            return _read(rest, _MPIRUN, {"launcher": "mpirun"})
        return _by_python(_start(name, rest), words[0])
    except Uncertain as error:
        raise Uncertain(refusal(name, str(error))) from None


def _start(name: str, words: list[ShellWord]) -> Call:
    if name == "accelerate":
        return _torchruns(_read(words, _ACCELERATE, {"launcher": "torchrun"}))
    if name == "horovodrun":
        return _read(words, _HOROVODRUN, {"launcher": "horovodrun", "strategy": "horovod"})
    if name == "deepspeed":
        return replace(_read(words, _DEEPSPEED, {"launcher": "deepspeed"}), script_only=True)
    if name not in ("torchrun", _OLD):
        raise Uncertain("its words aren't known here")
    call = _torchruns(_read(words, _TORCHRUN, {"launcher": "torchrun"}))
    by_variable = call.environment.pop("use-env", None)
    if name == _OLD and by_variable is None:  # it gives the local rank to scripts as an argument
        call.environment["PHALANX_LOCAL_RANK_OPTION"] = "1"
    return call


def _torchruns(call: Call) -> Call:
    """One that takes any file for a script, and would start a single rank where none is said."""
    call.script_only = True
    if not {"total", "nproc_per_node"} & call.said.keys():
        call.said["nproc_per_node"] = ""
    return call


def _by_python(call: Call, program: ShellWord) -> Call:
    """A launcher that is a Python script has its Python beside it, and starts scripts by that."""
    path = PurePath(program.literal or "")
    if path.name.startswith("python"):
        call.python = str(path)
    else:
        call.python = str(path.with_name("python")) if len(path.parts) > 1 else "python"
    return call


def _srun(words: list[ShellWord]) -> Call:
    """A script is srun's own task; a launcher's agent on each node is that launcher's business."""
    outer = _read(words, _SRUN, {"launcher": "srun"})
    if not is_launcher(outer.words):
        return outer
    inner = take_apart(outer.words)
    if inner.said.get("launcher") not in ("torchrun", "deepspeed"):
        raise Uncertain(f"srun starts another launcher, {outer.words[0].text}")
    tasks = outer.said.pop("ntasks_per_node", "1"), outer.said.pop("total", outer.said.get("nodes", ""))
    if tasks[0] != "1" or tasks[1] != outer.said.get("nodes", ""):
        raise Uncertain("srun starts several agents on a node")
    return replace(inner, said={**outer.said, **inner.said})


Action = Callable[[Call, str, ShellWord], None]
_Options = Mapping[str, "tuple[bool, Action]"]  # whether it has a value, and what it does


def _drop(call: Call, name: str, value: ShellWord) -> None:
    """What the launch decides itself: where ranks meet, which node this is."""


def _number(setting: str, *variables: str) -> Action:
    """An option with a number; a variable of Slurm's that says the same as the settings is left to them."""

    def act(call: Call, name: str, value: ShellWord) -> None:
        variable = re.fullmatch(r"\"?\$\{?(\w+)\}?\"?", value.text)
        if variable and variable[1] in variables:
            call.said.setdefault(setting, "*")
        elif value.literal is not None and re.fullmatch(r"[1-9]\d*", value.literal):
            call.said[setting] = value.literal
        elif setting == "nproc_per_node" and value.literal in ("auto", "gpu", "cpu"):
            call.said[setting] = str(value.literal)
        else:
            raise Uncertain(f"its option {name} {value.text} is no number")

    return act


def _text(setting: str) -> Action:
    def act(call: Call, name: str, value: ShellWord) -> None:
        if value.literal is None:
            raise Uncertain(f"its option {name} {value.text} is known in the job only")
        call.said[setting] = value.literal

    return act


def _only(*allowed: str) -> Action:
    def act(call: Call, name: str, value: ShellWord) -> None:
        if value.literal not in allowed:
            raise Uncertain(f"its option {name} {value.text} has no counterpart here")

    return act


def _set(variable: str, text: str | None = None) -> Action:
    def act(call: Call, name: str, value: ShellWord) -> None:
        call.environment[variable] = text if text is not None else (value.literal or Sh(value.text.strip('"')))

    return act


def _module(call: Call, name: str, value: ShellWord) -> None:
    call.module = True


def _carried(call: Call, name: str, value: ShellWord) -> None:
    """mpirun's `-x NAME`."""
    if value.literal is None or not re.fullmatch(r"[A-Za-z_]\w*", value.literal):
        raise Uncertain(f"its option {name} {value.text} sets a variable: write it in env")
    call.environment[value.literal] = Sh(f"${{{value.literal}:-}}")


def _per_node(call: Call, name: str, value: ShellWord) -> None:
    match = re.fullmatch(r"ppr:([1-9]\d*):node", value.literal or "")
    if match is None:
        raise Uncertain(f"its option {name} {value.text} has no counterpart here: write it in mpirun.args")
    call.said["nproc_per_node"] = match[1]


_MEETING = dict.fromkeys(
    ("node-rank", "master-addr", "master-port", "rdzv-id", "rdzv-backend", "rdzv-endpoint", "rdzv-conf", "local-addr"),
    (True, _drop),
)
_TORCHRUN: _Options = {
    **_MEETING,
    "nnodes": (True, _number("nodes", *_NODES)),
    "nproc-per-node": (True, _number("nproc_per_node", *_RANKS)),
    "standalone": (False, _drop),
    "use-env": (False, _set("use-env", "1")),
    "max-restarts": (True, _only("0")),
    "module": (False, _module),
    "m": (False, _module),
}
_SRUN: _Options = {
    "nodes": (True, _number("nodes", *_NODES)),
    "N": (True, _number("nodes", *_NODES)),
    "ntasks": (True, _number("total", *_TASKS, *_NODES)),
    "n": (True, _number("total", *_TASKS, *_NODES)),
    "ntasks-per-node": (True, _number("ntasks_per_node", *_RANKS)),
    "cpus-per-task": (True, _number("cpus_per_task", "SLURM_CPUS_PER_TASK")),
    "c": (True, _number("cpus_per_task", "SLURM_CPUS_PER_TASK")),
    "kill-on-bad-exit": (False, _drop),
    "K": (False, _drop),
    "label": (False, _drop),
    "l": (False, _drop),
    "unbuffered": (False, _drop),
    "u": (False, _drop),
    "export": (True, _only("ALL")),
    "mpi": (True, _text("mpi")),
    "cpu-bind": (True, _text("cpu_bind")),
}
_MPIRUN: _Options = {
    **dict.fromkeys(("n", "np"), (True, _number("total", *_TASKS))),
    **dict.fromkeys(("npernode", "ppn", "N"), (True, _number("nproc_per_node", *_RANKS))),
    "map-by": (True, _per_node),
    "bind-to": (True, _only("none")),
    "x": (True, _carried),
}
_HOROVODRUN: _Options = {
    **dict.fromkeys(("np", "num-proc"), (True, _number("total", *_TASKS))),
    "gloo": (False, _drop),
    "verbose": (False, _drop),
}
_DEEPSPEED: _Options = {
    **dict.fromkeys(("num-gpus", "num-accelerators"), (True, _number("nproc_per_node", *_RANKS))),
    "num-nodes": (True, _number("nodes", *_NODES)),
    **dict.fromkeys(("master-addr", "master-port", "node-rank"), (True, _drop)),
    "no-ssh": (False, _drop),
    "module": (False, _module),
}
_ACCELERATE: _Options = {
    "num-processes": (True, _number("total", *_TASKS)),
    "num-machines": (True, _number("nodes", *_NODES)),
    **dict.fromkeys(
        ("machine-rank", "main-process-ip", "main-process-port", "rdzv-backend", "same-network"), (True, _drop)
    ),
    "multi-gpu": (False, _drop),
    "cpu": (False, _set("ACCELERATE_USE_CPU", "true")),
    "mixed-precision": (True, _set("ACCELERATE_MIXED_PRECISION")),
    "dynamo-backend": (True, _only("no")),
    "module": (False, _module),
    "m": (False, _module),
}


def _read(words: list[ShellWord], options: _Options, said: dict[str, str]) -> Call:
    """Options up to the first word that is none. Raises Uncertain for one that isn't known."""
    call = Call(list(words), dict(said))
    while call.words and call.words[0].text.startswith("-") and call.words[0].literal != "-":
        word = call.words.pop(0)
        if word.text == "--":
            break
        name, equals, value = word.text.partition("=")
        key = name.lstrip("-").replace("_", "-")
        if key not in options and len(name) > 2 and name[1] != "-" and name[1:2] in options:  # -n4
            key, name, equals, value = name[1], name[:2], "=", word.text[2:]
        if key not in options:
            raise Uncertain(f"its option {name} has no counterpart here")
        valued, act = options[key]
        if valued and not equals:
            if not call.words:
                raise Uncertain(f"its option {name} has no value")
            act(call, name, call.words.pop(0))
        else:
            act(call, name, _as_word(value))
    if not call.words:
        raise Uncertain("it starts no script")
    return call


def _as_word(text: str) -> ShellWord:
    found = split(text)
    return found[0] if found and len(found) == 1 else ShellWord(text, None if found else text)
