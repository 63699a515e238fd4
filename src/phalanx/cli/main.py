"""The command's entry: finds the subcommand, and is the one place that maps errors to exit codes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..errors import PhalanxError, UsageError, did_you_mean
from . import streams

COMMANDS = {
    "run": "start a script on this machine, in any number of processes",
    "plan": "show what would be started, where and how; starts nothing",
    "submit": "write, save and submit the Slurm job of a script",
    "generate-slurm": "the same as submit",
    "status": "show jobs, how far they are and how they ended",
    "logs": "show what a job or one of its ranks printed",
    "test": "run distributed tests on every worker, with one verdict",
    "generate-scalability-report": "whether more ranks are worth it: a page, plots and tables of what runs took",
    "report": "the same as generate-scalability-report",
    "checkpoint": "a checkpoint's weights as one file; the checkpoints of a run",
    "allreduce": "time all-reduces over all ranks, for a report's forecast",
    "cancel": "end jobs, runs or whole series",
    "retry": "run the failed members of a series once more",
    "env": "make a virtual environment, here or by a job on the nodes",
    "container": "make images: pull one, build one, write a definition",
    "site": "write a site profile from what the cluster says; show the shipped ones",
    "config": "show settings, their values and which layer set them",
}
_MODULES = {"generate-slurm": "submit", "generate-scalability-report": "report"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (sys.argv's words by default); the result is the exit code.

    2 for errors that are the user's to correct, 130 after Ctrl-C, 141 if the reader of stdout has gone, 1 if stdout
    takes no more.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    streams.prepare()
    _hear_of_children()
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except PhalanxError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if not streams.refused(error):
            raise
        print(f"error: stdout can't be written: {error.strerror}", file=sys.stderr)
        return 1


def _hear_of_children() -> None:
    """Where our caller ignored SIGCHLD, so would we, and every process that we start would seem to end with code 0."""
    if hasattr(signal, "SIGCHLD") and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _dispatch(words: list[str]) -> int:
    if not words:
        print(_help(), file=sys.stderr)
        return 2
    name, rest = words[0], words[1:]
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name in ("-V", "--version"):
        print(f"phalanx {__version__}")
        return 0
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        raise UsageError(f"unknown command {name!r}: expected one of {known}.{did_you_mean(name, COMMANDS)}")
    code: int = import_module(f"phalanx.cli.{_MODULES.get(name, name)}").main(rest)
    return code


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: phalanx COMMAND [options]",
            "",
            "One PyTorch training script, any number of processes, strategies and launchers.",
            "",
            "commands:",
            *lines,
            "",
            "phalanx COMMAND --help says more; phalanx --version shows the version.",
        ]
    )
