"""How far a run is, and why its job failed: from its records, error files and output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import failure as verdict
from .. import local_notes
from ..launcher_output import since
from ..stops import TIME_LIMIT, stop
from . import states
from .jobs import OurJob, last_start

_TAIL = 256 * 1024  # bytes at the end of a file of records that are read
_OUTPUT = 64 * 1024  # and of a job's output
# What Slurm does of its own accord, and what would help.
_BY_SLURM = {
    "TIMEOUT": "it reached its time limit",
    "CANCELLED": "it was cancelled",
    "PREEMPTED": "it was preempted by another job",
    "NODE_FAIL": "one of its nodes failed",
    "BOOT_FAIL": "its nodes could not be booted",
    "DEADLINE": "its deadline passed",
    "REVOKED": "it went to another cluster",
}
# Why a job waits, where it may wait for ever.
_WAITS = {
    "PartitionTimeLimit": "its time limit is more than the partition's: it never starts; cancel it and set time",
    "PartitionNodeLimit": "it wants more nodes than the partition gives, or some of them are down: set nodes",
    "PartitionConfig": "no nodes of the partition fit: it never starts; set nodes, cpus_per_task or gpus_per_node",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition starts no jobs now",
    "BadConstraints": "no node fits: it never starts; set nodes, gpus_per_node, mem or constraint",
    "DependencyNeverSatisfied": "the job that it depends on ended otherwise: it never starts; cancel it",
    "JobHeldUser": "it is held: scontrol release lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "InvalidAccount": "the account is not valid: it never starts; set account",
    "InvalidQOS": "the QOS is not valid: it never starts; set qos",
    "launch failed requeued held": "it could not be started: scontrol release tries again",
}


@dataclass(frozen=True)
class Progress:
    """The last that rank 0 recorded: `values` are the last metrics, `time` is Unix time."""

    epoch: int | None
    step: int
    time: float
    values: dict[str, Any]

    def text(self, now: float) -> str:
        """`epoch 3, step 120, loss 0.31, 4 s ago`."""
        parts = [] if self.epoch is None else [f"epoch {self.epoch}"]
        parts.append(f"step {self.step}")
        name = next((name for name in self.values if "loss" in name), next(iter(self.values), None))
        if name is not None:
            value = self.values[name]
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
        return ", ".join([*parts, f"{duration(now - self.time)} ago"])


def progress(run_dir: Path) -> Progress | None:
    """From the end of rank 0's newest records; None before the first step."""
    files = sorted(run_dir.glob("records/0.*.jsonl"), key=_attempt)
    step: dict[str, Any] | None = None
    for record in (record for path in reversed(files) for record in _from_the_end(path)):
        if step is None and "step" in record and record.get("kind") in ("step", "metric", "epoch", "checkpoint"):
            step = record
        if step is not None and record.get("kind") == "metric":
            return Progress(step.get("epoch", record.get("epoch")), step["step"], step["time"], record["values"])
    return Progress(step.get("epoch"), step["step"], step["time"], {}) if step else None


def _attempt(path: Path) -> int:
    number = path.name.split(".")[1]
    return int(number) if number.isdecimal() else 0


def _from_the_end(path: Path) -> Iterator[dict[str, Any]]:
    for line in reversed(tail(path, _TAIL).splitlines()):
        try:
            record = json.loads(line)
        except ValueError:  # cut off: by where we began to read, or by its writer's end
            continue
        if isinstance(record, dict):
            yield record


def tail(path: Path, size: int) -> str:
    """The last `size` bytes of a file; nothing if it can't be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class Failure:
    """Why a job ended badly: lines for people, and the rank to blame if one is known."""

    lines: tuple[str, ...]
    culprit: verdict.Culprit | None = None


def failure(job: OurJob) -> Failure | None:
    """None for a job that hasn't ended, ended well, or left nothing that tells why it ended."""
    state = job.state
    if not state.finished or state.state in ("COMPLETED", "UNKNOWN") or not job.began:
        return None
    if job.local is not None:
        return _of_local(job, job.local)
    if state.state in _BY_SLURM:
        return Failure((f"{state.state}: {_BY_SLURM[state.state]}{_more(job)}",))
    if reason := not_run(job):
        return Failure((f"not run: {reason}",))
    if state.state == "FAILED" and not (job.run_dir / "jobs" / f"{job.number}.start").exists():
        return _never_began(job)
    ended = (job.run_dir / "jobs" / f"{job.number}.exit").exists()
    if state.state == "FAILED" and not ended and not any(job.run_dir.glob("errors/*.json")) and not state.signal:
        return Failure((f"the job's script ended with exit code {state.code} before its end: see its output",))
    if noted := _noted(job):
        return noted
    attempt = _attempt_of(job)
    culprit, stopped = verdict.judge(attempt)
    if state.state == "GONE" and culprit is None and stopped is None:
        return None
    if stopped is not None and stopped.what == TIME_LIMIT and job.chain is not None:
        return Failure((f"the time limit was reached{_more(_timed_out(job))}",))
    return Failure(tuple(verdict.conclude(attempt)[0]), culprit)


def not_run(job: OurJob) -> str:
    """Why the job's script ended before its launch, as it said itself; empty for one that
    launched."""
    return tail(job.run_dir / "jobs" / f"{job.number}.notrun", _OUTPUT).strip()


def _more(job: OurJob) -> str:
    """What else is known of an end by Slurm, and what to do about it."""
    state = job.state
    if state.state == "CANCELLED" and state.reason.isdecimal():
        return f" (by user {state.reason})"
    if state.state == "NODE_FAIL":
        return f": {nodes}" if (nodes := _failed_nodes(job)) else ""
    if state.state != "TIMEOUT":
        return ""
    limit = f" ({duration(state.limit)})" if state.limit else ""
    if job.chain is None:
        return f": set time, or --chain N to go on in further jobs{limit}"
    if job.chain[0] < job.chain[1]:
        return f"{limit}: the next job of the chain goes on"
    return f"{limit}, as the last of its chain: phalanx retry {job.run_dir.name} goes on"


def _failed_nodes(job: OurJob) -> str:
    """By the job's output, else those of its nodes that are down now."""
    stopped = stop("\n".join(tail(path, _OUTPUT) for path in job.outputs()), [])
    if stopped is not None and stopped.node:
        return stopped.node
    return ", ".join(states.down_now(job.state.hosts))


def _timed_out(job: OurJob) -> OurJob:
    return replace(job, state=replace(job.state, state="TIMEOUT"))


def _of_local(job: OurJob, note: local_notes.Note) -> Failure | None:
    """What the command that ran it has seen."""
    if not note.lines:
        return Failure((f"{job.state.state}: {job.state.reason}",)) if job.state.reason else None
    if note.culprit is None:
        return Failure(note.lines)
    return Failure(note.lines, verdict.Culprit(note.culprit, note.runner.host, note.lines[0], note.code or 1))


def _never_began(job: OurJob) -> Failure:
    """Its script leaves a note at once; Slurm says nothing where a node can't open the output file."""
    host = states.first_host(job.state.hosts) or "its node"
    lines = (
        f"the job's script did not begin on {host}, which probably sees no run directory {job.run_dir} or could not "
        f"open the output file {', '.join(map(str, job.outputs()))}",
        "  set run_root (and output, error) to folders on a file system that the login node and all nodes share",
    )
    return Failure(lines)


def _noted(job: OurJob) -> Failure | None:
    """What the job's script itself said at the end of its last start."""
    note = job.run_dir / "jobs" / f"{job.number}.verdict"
    try:
        said = json.loads(note.read_text(encoding="utf-8"))
        lines = tuple(map(str, said["lines"]))
        if said["start"] != last_start(note.with_suffix(".start")) or not lines:
            return None
        if said["rank"] is None:
            return Failure(lines)
        return Failure(lines, verdict.Culprit(said["rank"], said["host"], lines[0], job.state.code or 1))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _attempt_of(job: OurJob) -> verdict.Attempt:
    plan = plan_of(job.run_dir)
    start = last_start(job.run_dir / "jobs" / f"{job.number}.start") or 0.0
    said = "\n".join(since(tail(path, _OUTPUT), start, job.number) for path in job.outputs())
    return verdict.Attempt(
        run_dir=job.run_dir,
        since=start,
        returncode=job.state.code or 1,
        stderr=said,
        host=states.first_host(job.state.hosts),
        launcher=plan.get("launcher"),
        world_size=plan.get("world_size"),
        nproc_per_node=plan.get("nproc_per_node"),
    )


def plan_of(run_dir: Path) -> dict[str, Any]:
    """What was planned for the run; empty for a saved script that was submitted by hand."""
    for folder in (run_dir, run_dir.parent) if run_dir.name.startswith("array-") else (run_dir,):
        try:
            plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
            return plan if isinstance(plan, dict) else {}
        except (OSError, ValueError):
            continue
    return {}


def waits_for(state: states.JobState) -> str:
    """What the reason of a waiting job means, where one should do something; empty else."""
    if state.state != "PENDING":
        return ""
    if state.reason == "Dependency" and state.dependency:
        return f"it waits for {state.dependency}"
    return _WAITS.get(state.reason, "")


def duration(seconds: float) -> str:
    """`4 s`, `12 min`, `3 h`, `2 d`."""
    whole = max(0, round(seconds))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if whole >= 2 * size or (whole >= size and whole % size == 0):
            return f"{whole // size} {unit}"
    return f"{whole} s"
