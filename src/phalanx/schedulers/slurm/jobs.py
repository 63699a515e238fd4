"""Which jobs are ours: found by id, run or series in the run directories, with what those say of them."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ... import claims
from ...errors import PlanError, did_you_mean
from .. import local_notes
from . import identity, output, states
from .states import JobState, base_id

_GONE = "GONE"  # neither Slurm nor its exit code tell how it ended
_NEVER_STARTED = local_notes.NEVER_STARTED
_NOT_STARTED = "not started yet, or never"
_SKEW = 60.0  # seconds that clocks may differ
_UNKNOWN = JobState("", "", "UNKNOWN", "Slurm was not asked")


@dataclass(frozen=True)
class OurJob:
    """A job that was submitted for a run, or one task of an array. `state` is Slurm's word, or what
    the run directory tells; `chain` is (number, of how many). `cluster` and `slurm_submitted` are
    Slurm's own words, None in old notes; one `by_hand` has no note. `local` is the note of a run
    that is no job, but a launch of `phalanx run`."""

    job_id: str
    run_dir: Path
    name: str
    submitted: float
    series: str | None = None
    job_name: str = ""
    nodes: int | None = None
    chain: tuple[int, int] | None = None
    state: JobState = field(default=_UNKNOWN)
    local: local_notes.Note | None = None
    cluster: str | None = None
    slurm_submitted: float | None = None
    by_hand: bool = False

    @property
    def began(self) -> bool:
        """Whether it has run, so that it may have printed."""
        return self.state.state != "PENDING" and self.state.reason not in (_NEVER_STARTED, _NOT_STARTED)

    @property
    def number(self) -> str:
        """What Slurm counts by: %j, SLURM_JOB_ID."""
        return self.state.number or self.job_id

    @property
    def failed(self) -> bool:
        """Whether it has ended otherwise than well, be it by itself, by Slurm or by the user."""
        return self.state.finished and self.state.state not in ("COMPLETED", "UNKNOWN")

    def outputs(self) -> list[Path]:
        """Where it prints, as its script asks; a second file is that of its errors. Nothing of it need exist, and a
        local run prints on the terminal."""
        if self.local is not None:
            return []
        host = states.first_host(self.state.hosts)
        known = output.of_batch_script(self.job_id, self.number, self.job_name, host)
        run_dir = self.run_dir.parent if self.run_dir.name.startswith("array-") else self.run_dir
        return output.files(run_dir, Path(self.state.work_dir or os.curdir), known)


def known(root: Path) -> list[OurJob]:
    """All jobs that were submitted under a run root, and launches of `phalanx run`, oldest
    first."""
    found = [job for run_dir in _folders(_folders([root])) for job in of_run(run_dir)]
    return sorted(found, key=lambda job: (job.submitted, 0 if job.local else int(base_id(job.job_id))))


def of_run(run_dir: Path) -> list[OurJob]:
    """The jobs and launches of one run directory."""
    paths = _notes(run_dir)
    found = [job for path in paths if (job := read_note(path))]
    if re.fullmatch(r"job-\d+", run_dir.name) and not found:
        found = [_by_hand(run_dir)]
    if run_dir / local_notes.NOTE in paths and (one := _local(run_dir)):
        found.append(one)
    return found


def _local(run_dir: Path) -> OurJob | None:
    note = local_notes.read(run_dir)
    if note is None:
        return None
    return OurJob(
        local_notes.JOB_ID, run_dir, note.name, note.submitted, note.series, note.name, note.nodes, local=note
    )


def _folders(parents: Iterable[Path]) -> Iterator[Path]:
    for parent in parents:
        try:
            with os.scandir(parent) as entries:
                yield from [Path(entry.path) for entry in entries if entry.is_dir()]
        except OSError:  # not there yet, or another user's
            continue


def _notes(run_dir: Path) -> list[Path]:
    try:
        with os.scandir(run_dir / "jobs") as entries:
            return [Path(entry.path) for entry in entries if entry.name.endswith(".json") and entry.name[0] != "."]
    except OSError:
        return []


def read_note(path: Path) -> OurJob | None:
    """What was written down at the submission; None for what isn't such a note."""
    try:
        note: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not states.is_id(note["job_id"]):
            return None
        return OurJob(
            job_id=note["job_id"],
            run_dir=path.parents[1],
            name=note["name"],
            submitted=float(note["submitted"]),
            series=note.get("series"),
            job_name=note.get("job_name") or note["name"],
            nodes=note.get("nodes"),
            chain=(note["chain"][0], note["chain"][1]) if note.get("chain") else None,
            cluster=note.get("cluster"),
            slurm_submitted=note.get("slurm_submitted"),
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _by_hand(run_dir: Path) -> OurJob:
    """A saved script that was submitted by `sbatch FILE` makes its own run directory."""
    name = run_dir.parent.name
    job_id = run_dir.name.removeprefix("job-")
    began = claims.first(run_dir)
    cluster = began.job.cluster if began and began.job else None
    return OurJob(job_id, run_dir, name, run_dir.stat().st_ctime, job_name=name, cluster=cluster, by_hand=True)


def select(jobs: Sequence[OurJob], target: str) -> list[OurJob]:
    """The jobs that a user means by a job id, a run's name, id or directory, or a series; none if there are none.

    For one task of an array, its job with the task's id.
    """
    if states.is_id(target):
        whole = [job for job in jobs if job.job_id == base_id(target)]
        if whole:
            return [replace(job, job_id=target) for job in whole]
    path = Path(target).expanduser().absolute()
    for matches in (
        [job for job in jobs if job.series == target],
        [job for job in jobs if target in (job.run_dir.name, f"{job.name}/{job.run_dir.name}") or job.run_dir == path],
        [job for job in jobs if target in (job.name, job.job_name)],
        _newest_series(jobs, target),
    ):
        if matches:
            return matches
    return []


def _newest_series(jobs: Sequence[OurJob], name: str) -> list[OurJob]:
    """The last series of a job's name, whose members have longer ones."""
    stamped = re.compile(re.escape(name) + r"-\d{8}-\d{6}")
    series = max((job.series for job in jobs if job.series and stamped.fullmatch(job.series)), default=None)
    return [job for job in jobs if series and job.series == series]


def newest(jobs: Sequence[OurJob]) -> list[OurJob]:
    """Of each run the last job, in the order of the runs: what it ended as is how the run has ended."""
    return list({job.run_dir: job for job in sorted(jobs, key=lambda job: job.submitted)}.values())


def of_ids(root: Path, ids: Sequence[str]) -> list[OurJob]:
    """The jobs just submitted: older ones may have had the same numbers."""
    found = {job.job_id: job for job in known(root)}
    return [found[job_id] for job_id in ids if job_id in found]


def elsewhere(job_id: str) -> OurJob | None:
    """A job that Slurm knows, and whose run directory lies under another run root; None if Slurm knows no such job.

    Raises PlanError if it isn't one of ours.
    """
    said = states.detail(job_id)
    if said is None:
        return None
    # The run directory is the script's own folder and its argument.
    match = re.fullmatch(r"(?P<dir>.+)/job\.sh (?P=dir)", said.command or "")
    job = read_note(Path(match["dir"], "jobs", f"{said.base}.json")) if match else None
    if job is None:
        raise PlanError(
            f"job {job_id} ({said.name}, {said.state}) was not submitted by phalanx, or its run directory is gone: "
            f"use scontrol show job {job_id}, scancel {job_id}"
        )
    if identity.on_another_cluster(job.cluster, identity.here()) or not identity.is_ours(job, said):
        raise PlanError(f"job {job_id} is another one than that of {job.run_dir}, which had its number before")
    return replace(job, job_id=said.job_id if said.task else said.base)


def unknown(jobs: Sequence[OurJob], target: str, root: Path) -> PlanError:
    """The error for a target that is nothing here."""
    names = list(dict.fromkeys(job.name for job in reversed(jobs)))
    words = [*names, *dict.fromkeys(job.series for job in reversed(jobs) if job.series)]
    ids = [job.job_id for job in jobs if job.local is None]
    near = did_you_mean(target, ids if target.isdecimal() else words)
    listed = f"its newest runs: {', '.join(names[:5])}" if jobs else "it has no jobs"
    listed += f"; jobs: {', '.join(ids[-5:])}" if ids else ""
    return PlanError(f"no job, run or series {target!r} in {root}: {listed}.{near} (--run-root names another folder)")


def with_states(jobs: Sequence[OurJob], sacct: str = "auto", ask: bool = True) -> list[OurJob]:
    """The jobs with their states; each task of an array becomes a job of its own.

    `ask` False: as far as the run directories tell. Raises SchedulerError if Slurm doesn't answer.
    """
    here = identity.here() if ask and any(_cluster(job) for job in jobs) else None
    asked = {number: None for job in jobs if ask and (number := _asked_of(job, here))}
    said = states.ask(list(asked), sacct)
    found = []
    for job in jobs:
        number = _asked_of(job, here) if ask else None
        entries = _entries(job, _about(job, said.get(number or "", [])), number is not None)
        foreign = identity.on_another_cluster(_cluster(job), here)
        found += [_elsewhere(one, here or "") for one in entries] if foreign else list(entries)
    return found


def _cluster(job: OurJob) -> str | None:
    return job.local.cluster if job.local else job.cluster


def _asked_of(job: OurJob, here: str | None) -> str | None:
    """Whose state tells of this job: of a local run its allocation's may. None: Slurm here can't
    tell."""
    if identity.on_another_cluster(_cluster(job), here):
        return None
    if job.local:
        return job.local.allocation if job.local.unseen else None
    return base_id(job.job_id)


def _about(job: OurJob, said: list[JobState]) -> list[JobState]:
    """What is about this very job: its number may be another's by now."""
    if job.local is not None:  # its allocation was there before it
        return [one for one in said if one.submitted is None or one.submitted <= job.submitted + _SKEW]
    return [one for one in said if identity.is_ours(job, one)]


def _elsewhere(job: OurJob, here: str) -> OurJob:
    """One on another cluster, as far as its run directory tells."""
    if job.state.state != "UNKNOWN":
        return job
    return replace(job, state=replace(job.state, reason=f"on cluster {_cluster(job)}, and this is {here}"))


def _seen(job: OurJob, note: local_notes.Note, said: list[JobState], asked: bool) -> OurJob:
    """A local run as its note tells now, or else as its allocation has ended with all that ran in it."""
    state = note.state(time.time())
    if note.unseen and note.allocation and asked and all(one.finished for one in said):
        reason = f"job {note.allocation}, in which it ran, has ended" if note.began else _NEVER_STARTED
        state = replace(state, state=_GONE, reason=reason)
    return replace(job, local=note, state=state)


def _entries(job: OurJob, said: list[JobState], asked: bool) -> Iterator[OurJob]:
    if job.local is not None:
        yield _seen(job, local_notes.read(job.run_dir) or job.local, said, asked)
        return
    whole = base_id(job.job_id)
    found = [replace(job, job_id=state.job_id, run_dir=_task_dir(job, state.task), state=state) for state in said]
    found += _tasks_left_behind(job, {state.task for state in said}, asked)
    found.sort(key=lambda one: int(re.findall(r"\d+", one.job_id)[-1]) if "[" not in one.job_id else 10**9)
    if not found:
        found = [replace(job, state=left_behind(job, whole, asked))]
    meant = [one for one in found if one.job_id == job.job_id]
    # A task that still waits has no entry of its own, but a part in `12_[4-9]`.
    waiting = [replace(one, job_id=job.job_id) for one in found if "[" in one.job_id]
    yield from found if job.job_id == whole else meant or waiting or found


def _task_dir(job: OurJob, task: str | None) -> Path:
    return job.run_dir / f"array-{task}" if task and task.isdecimal() else job.run_dir


def _tasks_left_behind(job: OurJob, known_tasks: set[str | None], asked: bool) -> Iterator[OurJob]:
    """Tasks of an array that Slurm has forgotten."""
    for folder in sorted(job.run_dir.glob("array-*"), key=lambda path: (len(path.name), path.name)):
        task = folder.name.removeprefix("array-")
        if task.isdecimal() and task not in known_tasks:
            one = replace(job, job_id=f"{base_id(job.job_id)}_{task}", run_dir=folder)
            numbers = [path.name.partition(".")[0] for path in folder.glob("jobs/*.start")]
            yield replace(one, state=left_behind(one, numbers[-1] if numbers else "", asked))


def left_behind(job: OurJob, number: str, asked: bool = True) -> JobState:
    """What the run directory tells of a job that Slurm has forgotten, or wasn't `asked` about."""
    start = job.run_dir / "jobs" / f"{number}.start"
    code = _exit_code(start.with_suffix(".exit"), start)
    if code is not None:
        began = last_start(start)
        elapsed = None if began is None else max(0, round(start.with_suffix(".exit").stat().st_mtime - began))
        state = "COMPLETED" if code == 0 else "FAILED"
        return JobState(job.job_id, number, state, nodes=job.nodes, elapsed=elapsed, exit_code=code)
    if not asked:
        reason = "it has started, and not yet left an exit code" if start.exists() else _NOT_STARTED
        return JobState(job.job_id, number, "UNKNOWN", reason, job.nodes)
    reason = "left no exit code: ended by Slurm, or killed" if start.exists() else _NEVER_STARTED
    return JobState(job.job_id, number, _GONE, reason, job.nodes)


def _exit_code(path: Path, start: Path) -> int | None:
    """Of the last start; a job that was requeued has an older one too."""
    try:
        code = int(path.read_text())
        started = last_start(start)
        return code if started is None or path.stat().st_mtime >= started else None
    except (OSError, ValueError):
        return None


def last_start(path: Path) -> float | None:
    """When the job last began, in Unix time: its script appends a line each time."""
    try:
        return float(path.read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return None
