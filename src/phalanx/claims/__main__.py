"""`python -m phalanx.claims RUN_DIR [JOB]`: what a job's script asks before it starts ranks. JOB is the
one before it in a chain.

Prints the file to make when the ranks have ended, or `end CODE` where there is nothing to run: another
attempt runs in the directory, or the chain has ended with JOB. The reason goes to stderr, and to
`jobs/<id>.notrun` for `phalanx status`.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from ..errors import PlanError
from . import take
from .holder import of_batch_script


def main(arguments: list[str]) -> str:
    """The answer. Raises PlanError for a directory that can't be written."""
    run_dir, after = Path(arguments[0]), arguments[1] if len(arguments) > 1 and arguments[1] else None
    own = run_dir / "jobs" / os.environ.get("SLURM_JOB_ID", "none")
    for left in (".exit", ".stopped", ".notrun"):  # by an earlier start of the job
        own.with_suffix(left).unlink(missing_ok=True)
    ended = chain_end(run_dir, after) if after else None
    try:
        if ended is None:
            return str(take(run_dir, of_batch_script(os.environ, after)).released)
    except PlanError as error:
        ended = error.exit_code, str(error)
    code, reason = ended
    print(f"phalanx: not run: {reason}", file=sys.stderr)
    with suppress(OSError):
        own.with_suffix(".notrun").write_text(reason + "\n", encoding="utf-8")
    return f"end {code}"


def chain_end(run_dir: Path, job: str) -> tuple[int, str] | None:
    """Exit code and reason, if a chain ends with `job`: it left an exit code, and Slurm didn't stop it."""
    left = run_dir / "jobs" / job
    try:
        code = int(left.with_suffix(".exit").read_text())
    except (OSError, ValueError):
        return None
    if code == 0:
        return 0, f"job {job} before it in the chain ended well, so nothing is left to do"
    if left.with_suffix(".stopped").exists():
        return None
    return code, f"job {job} before it in the chain failed with exit code {code}, which a further job would repeat"


if __name__ == "__main__":
    print(main(sys.argv[1:]))
