"""One rank of `phalanx test`: runs pytest in this process and writes down what it does, for the verdict over all.

    rank.py LAUNCHER MARKERS SECONDS [pytest argument]...

`tests/<rank>.jsonl` in the run directory has a line when the rank starts, has collected, begins and ends a test, and
ends; ranks also read each other's: one whose test failed goes on only if all others have come through that test too,
since they may be waiting for it in a collective. Above all stands a time limit for a test, by which nothing hangs for
ever. The file stands alone, as it may be another Phalanx than the one of the rank's environment (a container's).
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import platform
import re
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

GRACE = 30.0  # seconds for the others to come through a test that failed here
LAST = 10.0  # seconds for the others to write their results, before this rank's failure ends the launch
COLLECTION = 600.0  # seconds that it may take: imports from a shared file system are slow
_AFTER = 2.0  # seconds between the end of a hung test and that of its rank: others hang too, and want to say so
_PLUMBING = re.compile(r"[/\\](_?pytest|pluggy|phalanx[/\\](testing|worker\.py|rank[/\\]entry\.py))|<frozen runpy>")
_NO_TESTS = int(pytest.ExitCode.NO_TESTS_COLLECTED)


class TestsFailed(SystemExit):
    """Leaves with pytest's exit code; the text is the report of this rank."""

    __test__ = False

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Journal:
    """This rank's file of events, and the others'. Each line is a write of its own to a file that is closed again, so
    that ranks on other nodes see it at once, over NFS too."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self.folder, self.rank, self.world_size = folder, rank, world_size
        folder.mkdir(mode=folder.parent.stat().st_mode & 0o777, exist_ok=True)
        self._path(rank).write_text("")  # a requeued job begins anew

    def _path(self, rank: int) -> Path:
        return self.folder / f"{rank}.jsonl"

    def write(self, event: str, **facts: Any) -> None:
        line = json.dumps({"v": 1, "event": event, "time": time.time(), **facts}) + "\n"
        with self._path(self.rank).open("ab", buffering=0) as file:
            file.write(line.encode())

    def count(self, rank: int, event: str) -> int:
        """How many of these events a rank has written."""
        try:
            return self._path(rank).read_text().count(f'{{"v": 1, "event": "{event}",')
        except OSError:
            return 0

    def collected(self, rank: int) -> list[str] | None:
        try:
            lines = self._path(rank).read_text().splitlines()
            found = [line for line in lines if line.startswith('{"v": 1, "event": "collected",')]
            return list(json.loads(found[0])["tests"]) if found else None
        except (OSError, ValueError):
            return None

    def behind(self, event: str, number: int, seconds: float) -> list[int]:
        """Wait for all ranks to have written `number` such events; those that haven't after `seconds`."""
        limit, pause = time.monotonic() + seconds, 0.05
        waiting = [rank for rank in range(self.world_size) if rank != self.rank]
        while True:
            waiting = [rank for rank in waiting if self.count(rank, event) < number]
            if not waiting or time.monotonic() > limit:
                return waiting
            time.sleep(pause)
            pause = min(2.0, pause * 1.5)


class RankPlugin:
    """Writes the journal, keeps the ranks together and ends tests that hang."""

    def __init__(self, journal: Journal, seconds: float, stderr: int) -> None:
        self.journal, self.seconds, self.stderr = journal, seconds, stderr
        self.grace = min(GRACE, seconds / 2)  # before the others' time is over too
        self.bad: list[str] = []
        self.counts: Counter[str] = Counter()
        self._outcome, self._said, self._duration = "passed", "", 0.0
        self.alone = False  # whether the others go on without this rank, so that nothing will come from them
        self._timer: threading.Timer | None = None
        self._thread = threading.get_ident()

    def watch(self, what: str, seconds: float) -> None:
        """End this rank if `what` isn't over in time. The second clock needs no Python to run."""
        self.unwatch()
        self._timer = threading.Timer(seconds, self._hung, (what, seconds))
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(seconds + 5 * _AFTER, exit=True, file=self.stderr)

    def unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def _hung(self, what: str, seconds: float) -> None:
        self.journal.write("hung", test=what, seconds=seconds)
        said = f"\nrank {self.journal.rank}: {what} took more than {seconds:g} s, and is now here:\n{self._where()}"
        os.write(self.stderr, said.encode(errors="replace"))
        time.sleep(_AFTER)
        os._exit(1)

    def _where(self) -> str:
        """The stack of the thread that runs the tests, without pytest's own frames."""
        frame = sys._current_frames().get(self._thread)
        stack = traceback.extract_stack(frame) if frame else []
        own = [entry for entry in stack if not _PLUMBING.search(entry.filename)]
        return "".join(traceback.format_list(own or stack))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._end(report.nodeid or "collection", "error", str(report.longrepr), 0.0)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """All ranks must have what rank 0 has, in its order."""
        mine = [item.nodeid for item in session.items]
        self.journal.write("collected", tests=mine)
        if self.journal.rank == 0 or self.bad:
            return
        theirs = self._of_rank_0()
        if theirs is not None and theirs != mine:
            other = sorted(set(theirs) ^ set(mine))[:3]
            what = f"first of those that differ: {', '.join(other)}" if other else "the same, in another order"
            self._end("collection", "error", f"rank 0 collected other tests ({what})", 0.0)
            self.alone = True
            pytest.exit(f"rank 0 collected other tests than rank {self.journal.rank}: {what}", returncode=1)

    def _of_rank_0(self) -> list[str] | None:
        limit = time.monotonic() + COLLECTION
        while (theirs := self.journal.collected(0)) is None and time.monotonic() < limit:
            if self.journal.count(0, "end"):
                return None  # its collection failed
            time.sleep(0.05)
        return theirs

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome, self._said, self._duration = "passed", "", 0.0
        self.journal.write("test", test=nodeid)
        self.watch(nodeid, self.seconds)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._duration += report.duration
        outcome = _outcome(report)
        if outcome != "passed" and self._outcome not in ("failed", "error"):
            self._outcome, self._said = outcome, report.longreprtext

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.unwatch()
        self._end(nodeid, self._outcome, self._said, self._duration)
        if self._outcome not in ("failed", "error"):
            return
        behind = self.journal.behind("done", sum(self.counts.values()), self.grace)
        if behind:
            self.alone = True
            ranks = ", ".join(map(str, behind[:8]))
            pytest.exit(f"{nodeid} failed, and {self.grace:g} s later it goes on in ranks {ranks}", returncode=1)

    def _end(self, test: str, outcome: str, text: str, seconds: float) -> None:
        self.counts[outcome] += 1
        if outcome in ("failed", "error"):
            self.bad.append(test)
        self.journal.write("done", test=test, outcome=outcome, seconds=round(seconds, 3), said=text[-2000:])


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    if report.failed:
        return "failed" if report.when == "call" else "error"
    return str(report.outcome)


def _arguments(folder: Path, rank: int, markers: str, own: list[str]) -> list[str]:
    """pytest's; what ranks would fight over lies in the run directory, and later words win over the project's."""
    words = ["-p", "phalanx.testing.plugin", *own, "-m", markers]
    words += [f"--junitxml={folder / f'{rank}.xml'}", "-o", f"cache_dir={folder / 'cache' / str(rank)}"]
    words += ["-o", "faulthandler_timeout=0"]
    words += ["-n", "0"] if importlib.util.find_spec("xdist") else []  # the launcher has started the processes
    if importlib.util.find_spec("pytest_timeout") and threading.current_thread() is not threading.main_thread():
        words += ["-o", "timeout_method=thread"]
    return words


def _report(plugin: RankPlugin, markers: str, code: int) -> str:
    """Why this rank failed, in a line."""
    if plugin.bad:
        more = f" and {len(plugin.bad) - 1} more" if len(plugin.bad) > 1 else ""
        return f"{_counted(plugin.counts)}: {plugin.bad[0]}{more}"
    if code == _NO_TESTS:
        return f"no test has marker {markers!r}"
    reasons = {2: "pytest was interrupted", 3: "an error inside pytest", 4: "pytest refused its arguments"}
    return reasons.get(code, f"pytest ended with exit code {code}")


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in ("failed", "error") if counts[name])


def _link_log(launcher: str, run_dir: Path, rank: int) -> None:
    """`logs_<launcher>/<job or run>/rank-N.log` leads to this rank's log in the run directory, into which its worker
    has sent what it prints. Nothing depends on it."""
    folder = Path(f"logs_{launcher}") / (os.environ.get("SLURM_JOB_ID") or run_dir.name)
    log = Path(f"/proc/self/fd/{sys.__stdout__.fileno()}").resolve() if sys.__stdout__ else None
    if log is None or rank == 0 or not log.is_relative_to(run_dir.resolve()):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / f"rank-{rank}.log"
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(log, folder.resolve()))
    except OSError as error:
        print(f"note: {folder} can't be made ({error.strerror}); the log is {log}", file=sys.stderr)


def _search_path() -> None:
    """As for `python -m pytest`: the folder of the command, not the one of this file."""
    own = str(Path(__file__).resolve().parent)
    sys.path[:] = [str(Path.cwd()), *(entry for entry in sys.path if entry != own)]


def main(launcher: str, markers: str, seconds: float, own: list[str]) -> None:
    """Run the tests; raises TestsFailed, after the others had time for their results, unless all went well."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run_dir = Path(os.environ["PHALANX_RUN_DIR"]).absolute()
    _search_path()
    _link_log(launcher, run_dir, rank)
    journal = Journal(run_dir / "tests", rank, world_size)
    journal.write("start", rank=rank, host=platform.node(), pid=os.getpid())
    plugin = RankPlugin(journal, seconds, os.dup(2))
    plugin.watch("the collection of the tests", COLLECTION)
    code = int(pytest.main(_arguments(journal.folder, rank, markers, own), [plugin]))
    plugin.unwatch()
    text = _report(plugin, markers, code) if code else ""
    journal.write("end", code=code, said=text)
    if code:
        if not plugin.alone:
            journal.behind("end", 1, LAST)
        raise TestsFailed(text, code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4:])
