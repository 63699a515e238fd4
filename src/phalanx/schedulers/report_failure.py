"""`python -m phalanx.report_failure RUN_DIR STATUS`: what a job says after a launch that ended badly.

Prints which rank failed, or what else ended the launch, as `phalanx run` does, and leaves with the exit code that
tells most: the failed rank's own, where srun gives the highest of all tasks' (143 for those that it ended itself).
Never fails for reasons of its own: the code is STATUS then.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..rank.hostlist import expand_hostlist
from ..rundir import write_atomic
from . import failure as verdict
from .launcher_output import of_job, shared, since
from .stops import Stop

KEPT = 64 * 1024  # bytes of the job's output that are looked at
_PATIENCE = 3.0  # seconds for scontrol


def main(arguments: list[str]) -> int:
    """Print the verdict to stderr, which is the job's own output; the exit code."""
    status = int(arguments[1]) if len(arguments) > 1 and arguments[1].isdecimal() else 1
    if not arguments or status == 0:
        return status
    try:
        run_dir = Path(arguments[0])
        ended = attempt(run_dir, status, os.environ)
        lines, code = verdict.conclude(ended)
        culprit, stopped = verdict.judge(ended)
        if "SLURM_JOB_ID" in os.environ:
            left = run_dir / "jobs" / os.environ["SLURM_JOB_ID"]
            _keep(ended, lines, culprit, left.with_suffix(".verdict"))
            _note_stop(stopped, left.with_suffix(".stopped"))
    except Exception as error:
        print(f"phalanx: no verdict on this failure ({type(error).__name__}: {error})", file=sys.stderr)
        return status
    print("\n".join([*verdict.traceback(culprit, ended.launcher), *lines]), file=sys.stderr)
    return code


def attempt(run_dir: Path, status: int, environ: Mapping[str, str]) -> verdict.Attempt:
    """The launch that just ended in this job, with what the job has printed since its start."""
    plan = _plan(run_dir)
    start = _start(run_dir, environ)
    world = plan.get("world_size") or _number(environ.get("PHALANX_EXPECTED_WORLD_SIZE"))
    printed, job = _output(run_dir, environ), environ.get("SLURM_JOB_ID", "")
    launcher = plan.get("launcher") or ("torchrun" if "PHALANX_RDZV_PORT" in environ else None)
    return verdict.Attempt(
        run_dir=run_dir,
        since=start,
        returncode=status,
        stderr=_said(printed, start, environ),
        host=environ.get("SLURMD_NODENAME") or os.uname().nodename,
        launcher=launcher,
        world_size=world,
        nproc_per_node=plan.get("nproc_per_node"),
        shared=shared(printed, job),
    )


def _note_stop(stopped: Stop | None, path: Path) -> None:
    """For the next job of a chain: what Slurm or the user stopped, or a lost node, may go on; a
    failure, or a launch that can't work, may not."""
    if stopped is not None and stopped.passing:
        with suppress(OSError):
            write_atomic(path, stopped.what + "\n")


def _keep(ended: verdict.Attempt, lines: list[str], culprit: verdict.Culprit | None, path: Path) -> None:
    """The verdict as a file, for `phalanx status`: other jobs may go on to write into the same output."""
    said = {"v": 1, "start": ended.since, "lines": lines, "rank": culprit.rank if culprit else None}
    said["host"] = culprit.host if culprit else None
    with suppress(OSError):  # a full disk: it has been printed
        write_atomic(path, json.dumps(said))


def _plan(run_dir: Path) -> dict[str, Any]:
    """What was planned; nothing is known for a saved script that was submitted by hand."""
    try:
        plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return plan if isinstance(plan, dict) else {}


def _start(run_dir: Path, environ: Mapping[str, str]) -> float:
    """When this start of the job began: the last line that its script left; else the start of time."""
    try:
        lines = (run_dir / "jobs" / f"{environ['SLURM_JOB_ID']}.start").read_text().split()
        return float(lines[-1])
    except (OSError, ValueError, KeyError, IndexError):
        return 0.0


def _said(output: str, start: float, environ: Mapping[str, str]) -> str:
    """What of the output belongs to this start of this job."""
    job, nodes = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_NODELIST", "")
    own = since(output, start, job)
    return of_job(own, job, expand_hostlist(nodes)) if job and nodes else own


def _output(run_dir: Path, environ: Mapping[str, str]) -> str:
    """The end of what the job printed to stderr."""
    for path in _candidates(run_dir, environ):
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - KEPT))
                return file.read().decode(errors="replace")
        except OSError:
            continue
    return ""


def _candidates(run_dir: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    """Where that may be: our own stderr if it is a file, as in a batch script, the file of Slurm's default name
    in the run directory, and the one that Slurm says."""
    try:
        if stat.S_ISREG(os.fstat(2).st_mode):
            yield Path(os.readlink("/proc/self/fd/2"))  # noqa: PTH115
    except OSError:
        pass
    job = environ.get("SLURM_JOB_ID")
    if job is None:
        return
    yield run_dir / f"slurm-{job}.out"
    said = _scontrol(job)
    if said is not None:
        yield Path(said)


def _scontrol(job: str) -> str | None:
    try:
        asked = ["scontrol", "show", "job", job]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^ *StdErr=(.+)$", done.stdout, re.MULTILINE)
    return found[1] if found else None


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None
