"""`phalanx run`: start a script on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from ..schedulers.local import run_local
from .launch import OPTIONS, plan_of
from .options import scan

HELP = """\
usage: phalanx run [options] [KEY=VALUE]... SCRIPT [script arguments]

Start SCRIPT on this machine. Its output goes to the terminal from rank 0 and to logs/ in the run
directory from the others. The exit code is the script's; when a rank fails the others are ended, and
the last lines say which failed, why, and where its log is.

{options}

examples:
  phalanx run --nproc 2 train.py --epochs 3
  phalanx run -c base.yaml -c big.yaml --strategy fsdp --precision bf16 train.py
  phalanx run --resume latest --nproc gpu train.py"""


def main(argv: Sequence[str]) -> int:
    """`argv` without `run`; the result is the exit code."""
    scanned = scan(argv, script=True)
    if "help" in scanned.flags:
        print(HELP.format(options=OPTIONS))
        return 0
    return run_local(*plan_of(scanned, "run"))
