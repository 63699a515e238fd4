"""`phalanx allreduce`: the time of all-reduces over the ranks of a launch, for a report's forecast."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from . import run, submit
from .launch import OPTIONS
from .options import scan

HELP = """\
usage: phalanx allreduce [--max-mib N] [--submit] [options] [KEY=VALUE]...

Time all-reduces of 1 KiB to N MiB (256) over all ranks, and print their bus bandwidth. With the run directory that it
leaves, `phalanx report` can tell latency from bandwidth, and forecast from two sizes. Run it as your training runs: the
same launcher, backend, nodes and ranks.

      --max-mib N        the largest, in MiB; about the size of your model's gradients
      --submit           as a Slurm job, with the options of phalanx submit
      --preview          only print the job's script

{options}

examples:
  phalanx allreduce --nproc 4
  phalanx allreduce --submit -N 4 --gpus-per-node 4 -t 10"""

SCRIPT = Path(__file__).resolve().parents[1] / "run" / "allreduce.py"
_LARGEST = "256"
_FLAGS = ("submit", "preview", "wait", "yes", "force", "local")


def main(argv: Sequence[str]) -> int:
    """`argv` without `allreduce`; the result is the exit code."""
    words = list(argv)
    if {"-h", "--help"} & set(words):
        print(HELP.format(options=OPTIONS))
        return 0
    most = _take(words, "--max-mib") or _LARGEST
    if not (most.isascii() and most.isdecimal() and int(most) >= 1):
        raise UsageError(f"--max-mib {most!r}: expected a number of MiB from 1")
    scanned = scan(words, script=False, flags=_FLAGS, valued=("jobid", "max-mib"))
    if "preview" in scanned.flags:
        words.append("--submit")
    start = submit.main if "--submit" in words else run.main
    return start([*(word for word in words if word != "--submit"), "--", str(SCRIPT), most])


def _take(words: list[str], name: str) -> str | None:
    """The value of an option of ours, which is then none of the launch's."""
    for index, word in enumerate(words):
        if word == name and index + 1 < len(words):
            value = words[index + 1]
            del words[index : index + 2]
            return value
        if word.startswith(f"{name}="):
            del words[index]
            return word.partition("=")[2]
    return None
