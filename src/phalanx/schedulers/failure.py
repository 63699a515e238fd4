"""Who failed first: from the ranks' own error files, else from the launcher's report; or what else ended the launch."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..rundir import log_path
from .launcher_output import Death, agents, deaths, possible
from .stops import Stop, stop

# A rank doesn't die of these because another rank failed; of an abort or a broken connection it may.
_OWN_DEATHS = tuple(
    int(getattr(signal, name)) for name in ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE") if hasattr(signal, name)
)
_FATAL = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGTERM")
_PORT_TAKEN = re.compile(r"port: (\d+)[^\n]*EADDRINUSE")  # torch's store
_PEERS = r"gloo|nccl|lost its connection|DistNetworkError|DistStoreError|failed to recv|Horovod has been shut down"
_LOST_PEER = re.compile(_PEERS, re.IGNORECASE)  # what is said of another rank's end
_BROKEN = re.compile(rf"{_PEERS}|connection (reset|closed|refused)|broken pipe|socket", re.IGNORECASE)  # or may be
_SAID = re.compile(  # by the worker, where it can't leave an error file
    r"^phalanx: rank (?P<rank>\d+) on (?P<host>\S+) failed: (?P<what>.*) \(exit code (?P<code>\d+); no report: ",
    re.MULTILINE,
)
_UNREACHED = re.compile(
    r"connectFullMesh failed|Unable to find (interface|address) for|socketStartConnect|no socket interface"
    r"|ncclSystemError",
    re.IGNORECASE,
)
_NO_NETWORK = (
    "  the ranks did not reach each other at the addresses that they told: set interface to the network interface that "
    "connects the nodes (ip addr lists them)"
)
_SIGNALS = 256 - 64  # exit codes from here on are a negative number's, a signal's
_TRACEBACK = 15  # lines of a traceback that are told again
_FEW = 4096  # ranks whose error files can be looked at one by one
_DIRECT = ("python", "srun", "mpirun", None)  # these start the ranks themselves; others start agents


@dataclass(frozen=True)
class Attempt:
    """A launch that ended badly. It began at Unix time `since` on `host`; `stderr` is the end of what its launcher
    printed, `returncode` subprocess's. `launcher` None: not known, to be told by the text."""

    run_dir: Path
    since: float
    returncode: int
    stderr: str
    host: str
    launcher: str | None
    world_size: int | None = None
    nproc_per_node: int | None = None
    shared: bool = False  # `stderr` may also hold other launches' words


@dataclass(frozen=True)
class Culprit:
    """The rank that failed first (None: it is not known which); `exit_code` is as a shell shows it. `time` is that
    of its error file."""

    rank: int | None
    host: str | None
    what: str
    exit_code: int
    error_file: Path | None = None
    time: float | None = None
    kind: str = "a rank"

    @property
    def who(self) -> str:
        return self.kind if self.rank is None else f"rank {self.rank}"


def conclude(attempt: Attempt) -> tuple[list[str], int]:
    """The lines that tell how the attempt ended, and the exit code that the command or job should have."""
    culprit, stopped = judge(attempt)
    code = attempt.returncode if attempt.returncode > 0 else 128 - attempt.returncode
    if culprit is not None:
        where = f" on {culprit.host}" if culprit.host else ""
        lines = [f"{culprit.who}{where} {culprit.what}"]
        log = _log(attempt, culprit.rank)
        lines += [f"  log: {log}"] if log else []
        lines += [f"  traceback: {culprit.error_file}"] if culprit.error_file else []
        lines += [_NO_NETWORK] if _UNREACHED.search(culprit.what) else []
        return lines, culprit.exit_code or 1
    if stopped is not None:
        return [stopped.what], code
    return [f"{attempt.launcher or 'the launch'} ended with exit code {code}; no rank reported an error"], code


def traceback(culprit: Culprit | None, launcher: str | None) -> list[str]:
    """The end of the culprit's traceback, where the launcher's own words came after it, or it stands in a log only."""
    shown = culprit is None or (culprit.rank == 0 and launcher in _DIRECT)
    error = _read(culprit.error_file) if culprit and culprit.error_file and not shown else None
    if culprit is None or error is None or str(error["exception"]).startswith("SystemExit"):
        return []
    lines = str(error.get("traceback", "")).splitlines()
    return [f"the last lines of {culprit.who}'s traceback:", *lines[-_TRACEBACK:]] if lines else []


def judge(attempt: Attempt) -> tuple[Culprit | None, Stop | None]:
    """The culprit, or else what ended the launch though no rank had failed; neither if nothing tells."""
    culprit = find(
        attempt.run_dir, attempt.since, attempt.returncode, attempt.stderr, attempt.host, attempt.launcher,
        attempt.world_size, attempt.shared,
    )  # fmt: skip
    return culprit, None if culprit else _stop(attempt.stderr, attempt.launcher)


def find(
    run_dir: Path, since: float, returncode: int, stderr: str, host: str, launcher: str | None,
    world_size: int | None = None, shared: bool = False,
) -> Culprit | None:  # fmt: skip
    """The culprit of a failed attempt that began at Unix time `since`; None when no rank is known to have
    failed (the launcher itself did, or somebody ended it). Error files of earlier attempts don't count."""
    written = _first_error_file(run_dir, since)
    if written is None or _BROKEN.search(written.what):
        written = _said(stderr) or written
    died = deaths(stderr, launcher)
    if shared:
        told = written is not None and not _BROKEN.search(written.what)
        died = [] if told else possible(died, returncode, launcher)
    ended = _stop(stderr, launcher)
    if ended is not None:  # what came after it is its effect
        died = [death for death in died if death.position < ended.position]
        if written is not None and _is_effect(written, ended):
            written = None
    elif launcher == "deepspeed" and not died and returncode > _SIGNALS:  # its words went to stdout
        died = [Death(None, host, returncode - 256, 0, outside=returncode - 256 == -signal.SIGTERM)]
    elif launcher == "python" and not died:
        return written or _died(Death(0, host, returncode, 0), host)
    chosen = _choose(run_dir, since, host, written, died)
    if chosen is not None and ended is None and (silent := _silent(run_dir, since, world_size)) is not None:
        chosen = _named(chosen, silent, died, written, returncode)
    return chosen or _agent(stderr, launcher, ended)


def _choose(run_dir: Path, since: float, host: str, written: Culprit | None, died: list[Death]) -> Culprit | None:
    killed = [death for death in died if -death.code in _OWN_DEATHS and not death.late]
    if killed:
        return _died(killed[0], host)
    if written is not None and not _BROKEN.search(written.what):
        return written
    own = [death for death in died if not (death.late and death.code == -signal.SIGKILL)]  # SIGKILL: the launcher's way
    for death in sorted(own, key=lambda death: death.late):
        # One that lost its connection has said so; a SIGTERM is the launcher's own way too.
        if death.outside if death.code == -signal.SIGTERM else not _left_words(run_dir, death.rank, since):
            return _died(death, host)
    return written or (_died(died[0], host) if died else None)


def _stop(stderr: str, launcher: str | None) -> Stop | None:
    direct = [] if launcher in _DIRECT else agents(stderr)
    return stop(stderr, [*deaths(stderr, launcher), *direct])


def _is_effect(written: Culprit, ended: Stop) -> bool:
    """Whether a rank failed because the launch was ended: later, or for want of ranks that are gone
    or never were."""
    if (ended.node or not ended.launched) and _BROKEN.search(written.what):
        return True
    return ended.time is not None and written.time is not None and written.time >= ended.time


def _silent(run_dir: Path, since: float, world_size: int | None) -> int | None:
    """The only rank that left no words, where all others did."""
    if world_size is None or not 1 < world_size <= _FEW:
        return None
    silent = [rank for rank in range(world_size) if not _left_words(run_dir, rank, since)]
    return silent[0] if len(silent) == 1 else None


def _named(chosen: Culprit, silent: int, died: list[Death], written: Culprit | None, returncode: int) -> Culprit:
    """Blame the `silent` rank where the launcher names none: MPICH doesn't for one that exits, nor
    does DeepSpeed's, whose code may be that of a rank which lost its connection."""
    if written is None or not _BROKEN.search(written.what):
        return chosen
    unnamed = bool(died) and chosen.rank is None
    if unnamed and chosen.exit_code != written.exit_code:
        return replace(chosen, rank=silent)
    if (unnamed and _LOST_PEER.search(written.what)) or (not died and returncode > 0):
        return Culprit(silent, None, "left without a word", returncode)
    return written if unnamed else chosen


def _agent(stderr: str, launcher: str | None, ended: Stop | None) -> Culprit | None:
    """A launcher's process on one of the nodes that died and took its ranks along."""
    if launcher in _DIRECT or ended is not None:
        return None
    died = agents(stderr)
    if not died:
        return None
    agent = _died(Death(None, died[0].host, died[0].code, 0), "", f"{launcher} itself")
    taken = _PORT_TAKEN.search(stderr)
    return replace(agent, what=f"{agent.what}: port {taken[1]} is in use there (master_port)") if taken else agent


def _log(attempt: Attempt, rank: int | None) -> Path | None:
    if rank is None:
        return None
    node = rank // (attempt.nproc_per_node or 1)
    log = log_path(attempt.run_dir, rank, node, attempt.world_size or 1)
    return log if log.exists() else None


def _first_error_file(run_dir: Path, since: float) -> Culprit | None:
    errors = [(path, error) for path in run_dir.glob("errors/*.json") if (error := _read(path))]
    current = [(path, error) for path, error in errors if error["time"] >= since]
    if not current:
        return None
    path, error = min(current, key=lambda item: float(item[1]["time"]))
    what, code = f"failed: {error['exception']}", int(error["exit_code"])
    return Culprit(error["rank"], error["host"], what, code, path, float(error["time"]))


def _said(stderr: str) -> Culprit | None:
    """The first rank that could only say how it failed: its disk was full."""
    said = _SAID.search(stderr)
    return Culprit(int(said["rank"]), said["host"], f"failed: {said['what']}", int(said["code"])) if said else None


def _left_words(run_dir: Path, rank: int | None, since: float) -> bool:
    error = _read(run_dir / "errors" / f"{rank}.json")
    return error is not None and error["time"] >= since


def _read(path: Path) -> dict[str, Any] | None:
    """An error file; None if its writer was killed over it."""
    try:
        error = json.loads(path.read_text(encoding="utf-8"))
        return error if {"rank", "host", "time", "exception", "exit_code"} <= set(error) else None
    except (OSError, ValueError, TypeError):
        return None


def _died(death: Death, here: str, kind: str = "a rank") -> Culprit:
    """A rank that left no words: all that is known is how its process ended. A launcher that meets on loopback
    calls its host localhost."""
    host = here if death.host in ("localhost", "127.0.0.1") else death.host
    if death.code >= 0:
        return Culprit(
            death.rank, host, f"ended with exit code {death.code}{_of_code(death.code)}", death.code, kind=kind
        )
    hint = _HINTS.get(signal_name(-death.code), " (not by the launch itself)" if death.outside else "")
    if death.out_of_memory:
        hint = ": out of memory, as Slurm says; set mem to more, or use less"
    return Culprit(death.rank, host, f"was killed by {signal_name(-death.code)}{hint}", 128 - death.code, kind=kind)


_HINTS = {
    "SIGKILL": " (often by the kernel, because memory ran out)",
    "SIGSEGV": " (a segmentation fault)",
}


def _of_code(code: int) -> str:
    """What an exit code means by custom: a container that could not be started ends with 255, and so does ssh;
    containers and shells add 128 to the signal that ended the command in them."""
    if code == 255:
        return " (of a container: its image, a bind, a folder or the command is missing)"
    name = signal_name(code - 128)
    return f" ({name} in a container or shell{_HINTS.get(name, '')})" if name in _FATAL else ""


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 40` for those without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
