"""`python -m phalanx.claims RUN_DIR`: what a job's script asks before it starts ranks.

Prints the file to make when the ranks have ended, or `end CODE` where there is nothing to run:
another attempt runs in the directory, or the chain has ended with the job before this one. The
reason goes to stderr, and to `jobs/<id>.notrun` for `phalanx status`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import PlanError
from . import first, take
from .holder import Holder, of_batch_script

_NOTE_COMES = 5.0  # seconds after a job's beginning within which its submission is noted


def main(run_dir: Path) -> str:
    """The answer. Raises OSError for a directory that can't be written."""
    after = predecessor(run_dir, os.environ)
    own = run_dir / "jobs" / os.environ.get("SLURM_JOB_ID", "none")
    for left in (".exit", ".stopped", ".notrun", ".verdict"):  # by an earlier start of the job
        own.with_suffix(left).unlink(missing_ok=True)
    me = of_batch_script(os.environ, after)
    ended = (chain_end(run_dir, after) if after else None) or _of_another_job(run_dir, me, os.environ)
    try:
        if ended is None:
            return str(take(run_dir, me).released)
    except PlanError as error:
        ended = error.exit_code, str(error)
    code, reason = ended
    print(f"phalanx: not run: {reason}", file=sys.stderr)
    with suppress(OSError):
        own.with_suffix(".notrun").write_text(reason + "\n", encoding="utf-8")
    return f"end {code}"


def predecessor(run_dir: Path, environ: Mapping[str, str]) -> str | None:
    """The job before this one in a chain, by what `phalanx submit` noted; for a task of an array,
    the one that ran in its directory."""
    own, array = environ.get("SLURM_JOB_ID", "none"), environ.get("SLURM_ARRAY_JOB_ID")
    after = _note((run_dir.parent if array else run_dir) / "jobs", array or own).get("after")
    if after is None or array is None:
        return after
    others = [path for path in (run_dir / "jobs").glob("*.start") if path.stem != own]
    return max(others, key=lambda path: path.stat().st_mtime).stem if others else None


def _note(folder: Path, job: str) -> dict[str, str | None]:
    """A job may begin before its submission is noted; one that was submitted by hand has no
    note."""
    end = time.monotonic() + _NOTE_COMES
    while any(folder.glob("*.json")):
        with suppress(OSError, ValueError):
            note = json.loads((folder / f"{job}.json").read_text(encoding="utf-8"))
            return note if isinstance(note, dict) else {}
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    return {}


def chain_end(run_dir: Path, job: str) -> tuple[int, str] | None:
    """Exit code and reason, if a chain ends with `job`: it left an exit code, and Slurm didn't stop
    it."""
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


def _of_another_job(run_dir: Path, me: Holder, environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Under plain `sbatch FILE` the directory is named by the job's number, which another job had
    before this one on another cluster, or before its counter began anew."""
    named = f"job-{environ.get('SLURM_ARRAY_JOB_ID') or environ.get('SLURM_JOB_ID')}"
    began = first(run_dir) if named in (run_dir.name, run_dir.parent.name) else None
    if began is None or began.job is None or me.job is None:
        return None
    if began.job.same(me.job) and me.job.restart > began.job.restart:
        return None
    return PlanError.exit_code, f"{run_dir} is the run of another job with this number: {began.who()}; move it away"


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
