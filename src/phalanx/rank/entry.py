"""One rank: `python -m phalanx.worker SCRIPT [ARGUMENT]…`, or `--exec COMMAND [ARGUMENT]…`.

Runs the script in this very process as `python SCRIPT` would, with the variables that
torch.distributed reads set. With PHALANX_RUN_DIR it also keeps the rank's log and, on a failure, a
report in `errors/<rank>.json`. Scripts need not know of any of this. A command takes the process's place,
with the same variables and log.

This file and all that it imports use the standard library alone, of Python 3.8 and later: ranks
run by the Python of whatever image they are in.
"""

from __future__ import annotations

import atexit
import builtins
import errno
import faulthandler
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from io import open_code
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from ..errors import PhalanxError, PlanError
from ..rundir import is_dry, log_path, make_folder, opener, share
from .gloo_end import let_gloo_finish_at_exit
from .launch_variables import meant
from .topology import Topology, said_master
from .world_size import check_world_size

USAGE = "usage: python -m phalanx.worker SCRIPT [ARGUMENT]... | --exec COMMAND [ARGUMENT]..."
EXEC = "--exec"
LOCAL_RANK = ("--local_rank", "--local-rank")
INTERRUPTED = 130


@dataclass(frozen=True)
class RunFiles:
    """Where a rank leaves its error report and its log."""

    folder: Path
    error: Path
    log: Path


@dataclass(frozen=True)
class Rank:
    """This rank, with its files and open log if there is a run directory. `launch` is the launcher's own stderr,
    `others` the number of other ranks."""

    rank: int
    files: RunFiles | None
    log: int | None
    launch: int | None = None
    others: int = 0


def main(arguments: list[str]) -> None:
    """Run a script as this rank. Leaves by SystemExit unless the script ends well."""
    said, arguments = _local_rank_option(arguments)
    if arguments[:1] == ["="]:  # a launcher would have taken words with a dash for its own
        arguments = [word[1:] for word in arguments[1:]]
    command = arguments[1:] if arguments[:1] == [EXEC] else None
    if not arguments or command == []:
        print(USAGE, file=sys.stderr)
        sys.exit(PhalanxError.exit_code)
    folder = os.environ.get("PHALANX_RUN_DIR")
    rank, log, launch = None, None, None
    files = _files(Path(folder).absolute(), f"{_host()}-{os.getpid()}") if folder else None
    try:
        topology = Topology.current()
        if os.environ.pop("PHALANX_LOCAL_RANK_OPTION", ""):  # in place of a launcher that gives it as an argument
            said = str(topology.local_rank)
        check_world_size(topology, os.environ)
        rank = topology.rank
        if files:
            files = _files(files.folder, str(rank), (rank, topology.node_rank, topology.world_size))
            launch = os.dup(2) if sys.stderr is not None else None
            log = _open_log(files, rank)
        script = None if command else _existing(arguments[0])
        _set_variables(topology, files.folder if files else None)
        _make_temporary_folders()
        if command:
            _become(command)
    except PhalanxError as error:
        print(f"phalanx: {error}", file=sys.stderr)
        if files and files.folder.is_dir():
            _report(error, files, rank, error.exit_code, launch)
        sys.exit(error.exit_code)
    assert script is not None
    if said is not None:
        arguments[1:1] = _in_scripts_words(said, script)
    _run(script, arguments, Rank(rank, files, log, launch, topology.world_size - 1))


def _local_rank_option(arguments: list[str]) -> tuple[str | None, list[str]]:
    """The local rank that DeepSpeed's launcher puts before all else, and what is left."""
    option, _, value = arguments[0].partition("=") if arguments else ("", "", "")
    return (value, arguments[1:]) if option == LOCAL_RANK[0] else (None, arguments)


def _in_scripts_words(local_rank: str, script: Path) -> list[str]:
    """The option for the local rank, as a script written for DeepSpeed's launcher has it; others would refuse it."""
    try:
        text = script.read_bytes()
    except OSError:  # running it will say so
        return []
    return next(([f"{option}={local_rank}"] for option in LOCAL_RANK if option.encode() in text), [])


def _become(command: list[str]) -> None:
    """Put a command in this process's place; its exit code and signals are the rank's."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise PlanError(f"cannot start {command[0]!r} on host {_host()}: {error.strerror}") from None


def _files(folder: Path, name: str, place: tuple[int, int, int] = (0, 0, 1)) -> RunFiles:
    """`place` is rank, node rank and world size."""
    return RunFiles(folder, folder / "errors" / f"{name}.json", log_path(folder, *place))


def failure(error: BaseException, rank: int | None, exit_code: int) -> dict[str, object]:
    """The report of a failed rank, as errors/<rank>.json holds it. `rank` is None if it is unknown."""
    import time
    import traceback

    return {
        "v": 1,
        "rank": rank,
        "host": _host(),
        "pid": os.getpid(),
        "time": time.time(),
        "exception": headline(error),
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        "exit_code": exit_code,
    }


def write_failure(report: dict[str, object], path: Path) -> None:
    """Write a report whole or not at all."""
    import json

    make_folder(path.parent)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(draft, "wb", opener=opener) as file:
        file.write(json.dumps(report).encode() + b"\n")
    draft.replace(path)


def exit_status(code: object) -> int:
    """The status with which Python leaves for SystemExit(code)."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _run(script: Path, arguments: list[str], me: Rank) -> None:
    atexit.register(_remove_empty_cache)
    let_gloo_finish_at_exit()  # before the script's own callbacks, so that it comes after them
    sys.argv = arguments
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = str(script.resolve().parent)
    module = _main_module(script)
    sys.modules["__main__"] = module
    code: CodeType | None = None
    failed: BaseException | None = None
    try:
        with open_code(str(script)) as file:
            code = compile(file.read(), str(script), "exec", dont_inherit=True)
        exec(code, module.__dict__)
        failed = _dry_run_without_run(me.files)
    except SystemExit as error:
        status = exit_status(error.code)
        failed = None if status else _dry_run_without_run(me.files)
        if status:
            _note(_report(_below(error, code), me.files, me.rank, status, me.launch), me.log)
        if failed is None:
            if not status:
                _say_if_alone(script, me)
            raise
    except BaseException as error:
        failed = _below(error, code)
    if failed is not None:  # outside the handler, as the script's own hook must see no exception in flight
        _fail(failed, me)
    _say_if_alone(script, me)


def _say_if_alone(script: Path, me: Rank) -> None:
    """Several ranks that never met have each done the same, which is seldom meant."""
    if me.others and me.rank == 0 and not _met_others():
        print(
            f"phalanx: note: {me.others + 1} ranks ran {script.name}, and it made no process group: each trained by "
            "itself, and wrote into the same files. Call phalanx.init() or torch.distributed.init_process_group() in "
            "it, or start one with --nproc 1",
            file=sys.stderr,
            flush=True,
        )


def _met_others() -> bool:
    """Whether the script has made a group, or uses another library by which ranks meet."""
    if any(name in sys.modules for name in ("horovod", "mpi4py", "jax", "tensorflow", "ray", "pytest")):
        return True
    started = getattr(sys.modules.get("phalanx.run.setup"), "_started", False)
    torchs = sys.modules.get("torch.distributed.distributed_c10d")
    # The method stays when the group is destroyed.
    made = getattr(torchs, "_default_pg_init_method", None) is not None
    return started or made or (torchs is not None and torchs.is_initialized())


def _dry_run_without_run(files: RunFiles | None) -> BaseException | None:
    """What is wrong with a dry run whose script made no run: it was none."""
    if files is None or not is_dry(files.folder) or any(files.folder.glob("records/*.jsonl")):
        return None
    return PlanError(
        "the script ended without phalanx.init(): a dry run shortens the loops of the run that it makes, and what this "
        "script did was done in full"
    )


def _remove_empty_cache() -> None:
    """torch makes a folder for compiled code in /tmp also where nothing is compiled; one that holds something stays for
    the next run."""
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))  # torch sets it when it makes the folder
    if folder.name.startswith("torchinductor_"):
        with suppress(OSError):
            folder.rmdir()


def _main_module(script: Path) -> ModuleType:
    """A module as Python itself makes it for a script."""
    module = ModuleType("__main__")
    module.__dict__.update(
        __file__=str(script),
        __builtins__=builtins,
        __loader__=SourceFileLoader("__main__", str(script)),
        __cached__=None,
        __annotations__={},
    )
    return module


def _existing(script: str) -> Path:
    path = Path(script).absolute()
    if path.is_file():
        return path
    what = "is a folder" if path.is_dir() else "is not there"
    raise PlanError(f"script {script!r} {what}: looked for {path} on host {_host()}")


def _set_variables(topology: Topology, run_dir: Path | None) -> None:
    """All that torch.distributed needs; a single process may meet itself at any free port."""
    visible = os.environ.pop("PHALANX_VISIBLE_DEVICES", "")
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    place = _meeting_place(topology, run_dir) if run_dir else None
    os.environ.update(topology.environ())
    if place is not None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place[0], str(place[1])
    if topology.num_nodes > 1:
        from .network import choose  # as above

        choose(topology)
    if os.environ.get("PHALANX_HOROVOD_RANKS") and run_dir is not None:
        from .horovod_ranks import provide  # most ranks are none of Horovod's

        os.environ.update(provide(topology, os.environ, run_dir))
    if topology.world_size == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = str(_free_port())


def _meeting_place(topology: Topology, run_dir: Path) -> tuple[str, int] | None:
    if topology.world_size == 1 or topology.source == "torchrun" or said_master(meant(os.environ))[1] is not None:
        return None
    from .rendezvous import meet  # sockets and json cost start-up time, and most ranks are told where to meet

    return meet(topology, os.environ, run_dir)


def _make_temporary_folders() -> None:
    """TMPDIR and its like may be on the node's own disk, where nobody has made them yet."""
    folders = [os.environ.get(name) for name in ("TMPDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
    for folder in filter(None, folders):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"phalanx: cannot make {folder} on host {_host()}: {error.strerror}; set tmpdir", file=sys.stderr)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _open_log(files: RunFiles, rank: int) -> int:
    """Open the rank's log, for crashes' stacks too; all but rank 0 also print there."""
    try:
        if not files.folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(files.folder))
        share(files.folder)
        make_folder(files.error.parent)
        make_folder(files.log.parent)
        log = opener(files.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    except OSError as error:
        raise PlanError(
            f"rank {rank} on host {_host()} cannot write the run directory {files.folder}: "
            f"{error.strerror} ({error.filename}). All nodes must share it: set run_root to a shared file system"
        ) from None
    if rank != 0:
        _print_to(log)
    faulthandler.enable(log)
    return log


def _print_to(log: int) -> None:
    """Send the file descriptors themselves there, so that C++ and child processes follow."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        if stream is not None:
            stream.flush()
        os.dup2(log, number)
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)


def _fail(error: BaseException, me: Rank) -> None:
    """What Python does for an uncaught exception, after leaving the report."""
    status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    report = _report(error, me.files, me.rank, status, me.launch)
    if me.rank == 0 or sys.excepthook is not sys.__excepthook__:
        _note(report, me.log)
    _call_hook(error)
    sys.exit(status)


def _call_hook(error: BaseException) -> None:
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as second:
        print("Error in sys.excepthook:", file=sys.stderr)
        inner = second.__traceback__ and second.__traceback__.tb_next
        sys.__excepthook__(type(second), second.with_traceback(inner), inner)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)


def _report(
    error: BaseException, files: RunFiles | None, rank: int | None, status: int, launch: int | None
) -> dict[str, object]:
    report = failure(error, rank, status)
    if files is not None:
        try:
            write_failure(report, files.error)
        except OSError as reason:
            _say_failure(report, reason, launch)
    return report


def _say_failure(report: dict[str, object], reason: OSError, launch: int | None) -> None:
    """Where a full disk takes no report, and no line of the rank's log either, the launch's verdict reads this."""
    what = " ".join(str(report["exception"]).split())[:500]
    said = f"phalanx: rank {report['rank']} on {report['host']} failed: {what} "
    said += f"(exit code {report['exit_code']}; no report: {reason.strerror or reason})\n"
    with suppress(OSError):
        os.write(2 if launch is None else launch, said.encode(errors="backslashreplace"))


def _note(report: dict[str, object], log: int | None) -> None:
    if log is not None:
        with suppress(OSError):  # a full disk, perhaps the very reason
            os.write(log, str(report["traceback"]).encode(errors="backslashreplace"))


def _below(error: BaseException, code: CodeType | None) -> BaseException:
    """The error without the frames above the script's own."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    return error.with_traceback(trace)


def headline(error: BaseException) -> str:
    """The error in a line, as the end of a traceback has it."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    try:
        text = str(error)
    except Exception:
        text = "<no text: its __str__ failed>"
    return f"{name}: {text}" if text else name


def _host() -> str:
    import platform

    return platform.node()
