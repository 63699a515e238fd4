"""What the ranks of `phalanx test` wrote down, and the verdict over all of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from ..rundir import log_path

FOLDER = "tests"  # in the run directory
NO_TESTS = 5  # pytest's exit code
_SHOWN = 4  # failed workers whose logs are shown
_LINES = 25  # of each log
_OUTCOMES = ("failed", "error", "passed", "skipped", "xfailed", "xpassed")


@dataclass(frozen=True)
class Worker:
    """One rank's results. `code` is pytest's exit code, None for a rank that ended before; `during` is the test that it
    was in then. `why` is what pytest says of its first failure."""

    rank: int
    host: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    why: str = ""
    code: int | None = None
    said: str = ""
    during: str | None = None
    hung: float | None = None
    seconds: float = 0.0

    @property
    def who(self) -> str:
        return f"rank {self.rank}" + (f" on {self.host}" if self.host else "")

    def text(self) -> str:
        """`12 passed, 1 skipped`."""
        return ", ".join(f"{self.counts[name]} {name}" for name in _OUTCOMES if self.counts.get(name)) or "no tests"


def read(run_dir: Path, world_size: int) -> list[Worker]:
    """One entry a rank, also for those that left nothing."""
    return [_worker(rank, _events(run_dir / FOLDER / f"{rank}.jsonl")) for rank in range(world_size)]


def _events(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        try:
            events.append(json.loads(line))
        except ValueError:  # its writer was killed over it
            continue
    return [event for event in events if isinstance(event, dict) and "event" in event]


def _worker(rank: int, events: Sequence[dict[str, Any]]) -> Worker:
    if not events:
        return Worker(rank)
    done = [event for event in events if event["event"] == "done"]
    last = {event["event"]: event for event in events}
    bad = [event for event in done if event["outcome"] in ("failed", "error")]
    end, hung = last.get("end", {}), last.get("hung", {})
    begun, over = last.get("test", {}).get("test"), done[-1]["test"] if done else None
    return Worker(
        rank=rank,
        host=last.get("start", {}).get("host"),
        counts=Counter(event["outcome"] for event in done),
        failed=tuple(event["test"] for event in bad),
        why=bad[0].get("said", "") if bad else "",
        code=end.get("code"),
        said=end.get("said", ""),
        during=hung.get("test") or (begun if begun != over and not end else None),
        hung=hung.get("seconds"),
        seconds=events[-1]["time"] - events[0]["time"],
    )


@dataclass(frozen=True)
class Launch:
    """A launch of tests of one `marker`, selected by the expression `markers`, that has ended. `code` is the launch's
    own exit code, and `reason` what it says of its end (a rank that was killed, a time limit); `culprit` is the rank
    that it blames, if any. `stopped`: by a signal to the command, so that nobody is to blame."""

    run_dir: Path
    marker: str
    markers: str
    workers: list[Worker]
    nproc_per_node: int
    code: int
    reason: tuple[str, ...] = ()
    culprit: int | None = None
    stopped: bool = False

    @property
    def exit_code(self) -> int:
        """pytest's where all workers agree; 1 for a failure of some; the launch's own if there are no results."""
        if self.stopped:
            return self.code
        codes = {worker.code for worker in self.workers}
        if len(codes) == 1 and None not in codes:
            return codes.pop() or self.code
        if codes == {None} and not any(worker.failed or worker.hung for worker in self.workers):
            return self.code or 1
        return 1

    @property
    def empty(self) -> bool:
        """Whether there was no test of this kind."""
        return {worker.code for worker in self.workers} == {NO_TESTS}


def verdict(launch: Launch) -> list[str]:
    """What is said at the end: a line if all went well and alike, else who did not, and the end of their logs."""
    if launch.empty:
        return [f"{launch.marker}: nothing was tested: no test has marker {launch.markers!r}, or none is left of those"]
    if launch.stopped:
        return [f"{launch.marker}: {launch.reason[0]}"]
    workers = launch.workers
    seconds = max(worker.seconds for worker in workers)
    alike = workers[0].code is not None and len({(worker.text(), worker.code) for worker in workers}) == 1
    count = f"{len(workers)} worker{'s' * (len(workers) > 1)}"
    head = f"{launch.marker}: {'FAILED: ' * bool(launch.exit_code)}{count}"
    lines = [f"{head}: {workers[0].text()} in {seconds:.0f} s" if alike else f"{head} in {seconds:.0f} s:"]
    if not alike:
        lines += [f"  {line}" for line in _table(workers)]
    return lines if launch.exit_code == 0 else [*lines, *_failures(launch)]


def _table(workers: Iterable[Worker]) -> list[str]:
    """Neighbours with the same result share a line."""
    lines = []
    for text, group in groupby(workers, lambda worker: worker.text() + _state(worker)):
        found = list(group)
        first, last = found[0], found[-1]
        lines.append(f"{first.who if first is last else f'ranks {first.rank} to {last.rank}'}: {text}")
    return lines


def _state(worker: Worker) -> str:
    if worker.hung is not None:
        return f"; hung in {worker.during}"
    if worker.code is None:
        return f"; ended in {worker.during}" if worker.during else "; ended early"
    return "" if worker.code in (0, 1) else f"; {worker.said}"


def _failures(launch: Launch) -> list[str]:
    """The workers to blame; those that were only ended with the others are none, if somebody else is."""
    blamed = [worker for worker in launch.workers if worker.failed or worker.hung or worker.code]
    blamed.sort(key=lambda worker: not worker.failed)  # others may only have waited for those
    named = [worker for worker in launch.workers if worker.rank == launch.culprit and worker not in blamed]
    blamed = named + blamed
    if not blamed:
        return [*launch.reason] or [f"the launch ended with exit code {launch.code}, and no worker says why"]
    if len(blamed) == len(launch.workers) > 1 and len({worker.failed for worker in blamed}) == 1:
        lines = [f"all workers: {_why(blamed[0], launch)}", *_log(launch, blamed[-1])]
    else:
        lines = []
        for worker in blamed[:_SHOWN]:
            lines += [f"{worker.who}: {_why(worker, launch)}", *_log(launch, worker)]
        lines += [f"and {len(blamed) - _SHOWN} more workers"] if len(blamed) > _SHOWN else []
    return [*lines, f"logs: {launch.run_dir / 'logs'}"]


def _why(worker: Worker, launch: Launch) -> str:
    if worker.failed:
        bad = ", ".join(f"{worker.counts[name]} {name}" for name in ("failed", "error") if worker.counts.get(name))
        more = f" and {len(worker.failed) - 3} more" if len(worker.failed) > 3 else ""
        return f"{bad}: {', '.join(worker.failed[:3])}{more}"
    if worker.hung is not None:
        return f"{worker.during} took more than {worker.hung:g} s: its log says where"
    if worker.code is None:
        where = f" in {worker.during}" if worker.during else ""
        return f"died{where}" + (f" ({launch.reason[0]})" if launch.reason else "")
    return worker.said or f"pytest ended with exit code {worker.code}"


def _log(launch: Launch, worker: Worker) -> list[str]:
    """The last lines of its log, or what it wrote down of its failure if it was ended before pytest printed that. Rank
    0's output was on the terminal, or is the job's."""
    node = worker.rank // (launch.nproc_per_node or 1)
    path = log_path(launch.run_dir, worker.rank, node, len(launch.workers))
    early = worker.code is None and worker.why
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = worker.why.splitlines() if early else _own_words(text.splitlines())
    return [*(f"  | {line}" for line in lines[-_LINES:]), *([f"  log: {path}"] if text else [])]


def _own_words(lines: list[str]) -> list[str]:
    """Without the traceback by which the rank left."""
    ends = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if ends and any("TestsFailed" in line for line in lines[ends[-1] :]):
        return lines[: ends[-1]]
    return lines
