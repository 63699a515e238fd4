"""A series on this machine: one member after the other, seen, cancelled and retried from another terminal."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tools import command, start, wait_for

pytestmark = pytest.mark.slow

SCRIPT = """
import os, pathlib, sys, time
rank, size, run_dir = os.environ["RANK"], os.environ["WORLD_SIZE"], pathlib.Path(os.environ["PHALANX_RUN_DIR"])
with open("order", "a") as order:
    if rank == "0": order.write(f"{run_dir.parent.name}/{run_dir.name} {sys.argv[1:]}\\n")
if "ddp-1x2" in str(run_dir) and rank == "1" and not os.path.exists("mended"):
    while run_dir.name not in pathlib.Path("order").read_text():  # else rank 0 might be ended before it wrote
        time.sleep(0.02)
    raise ValueError("not yet")
if "fsdp-1x1" in str(run_dir) and not os.path.exists("mended"):
    time.sleep(120)
"""


def phalanx(*words: str, **more: Any) -> str:
    done = start(sys.executable, "-m", "phalanx", *words, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def states(series: str) -> dict[str, str]:
    rows = [line.split() for line in phalanx("status", series).splitlines() if line.startswith("local ")]
    return {row[1]: row[2] for row in rows}


def begin(*words: str) -> tuple[subprocess.Popen[str], str]:
    """The command, and the name of its series."""
    process = subprocess.Popen(
        command("--mode", "scaling-test", "--strategies", "ddp,fsdp", *words), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    return process, re.search(r"series (s-\d{8}-\d{6}): ", first)[1]  # type: ignore[index]


def order(work: Path) -> list[str]:
    return [line.partition("/")[0] for line in (work / "order").read_text().splitlines()]


def test_a_failed_and_a_cancelled_member_stop_no_other_and_run_again_alone(work: Path) -> None:
    (work / "s.py").write_text(SCRIPT)
    process, series = begin("--scalability-nproc", "1,2", "s.py", "a b")
    names = ["s-ddp-1x1", "s-ddp-1x2", "s-fsdp-1x1", "s-fsdp-1x2"]
    wait_for(lambda: (work / "order").exists() and "s-fsdp-1x1" in order(work))
    assert states(series) == dict(zip(names, ["COMPLETED", "FAILED", "RUNNING", "PENDING"], strict=True))
    assert phalanx("cancel", "s-fsdp-1x1") == "cancelled s-fsdp-1x1, which was RUNNING\n"
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1  # the failed rank's code
    assert order(work) == names
    assert "[4/4] s-fsdp-1x2\n" in said
    *_, done, failed, stopped, again, report = said.splitlines()
    assert done.startswith(f"series {series}: 2 of 4 runs completed, ")
    assert re.fullmatch(r"  failed: s-ddp-1x2: rank 1 on \S+ failed: ValueError: not yet", failed)
    assert stopped == "  not run to the end: s-fsdp-1x1"
    assert again == f"to run only those again: phalanx retry {series}"
    assert report == f"the report: phalanx report {series}"
    ended = dict(zip(names, ["COMPLETED", "FAILED", "CANCELLED", "COMPLETED"], strict=True))
    assert states(series) == ended

    (work / "mended").touch()
    done = start(sys.executable, "-m", "phalanx", "retry", series, "--run-root", str(work / "runs"), cwd="/")
    assert done.returncode == 0, done.stderr
    assert order(work)[4:] == names[1:3]
    assert len(list((work / "runs").glob("*/*"))) == 4  # each in its own run directory
    assert len(set((work / "order").read_text().splitlines())) == 4  # with the same arguments
    assert states(series) == dict.fromkeys(names, "COMPLETED")


@pytest.mark.parametrize("how", ["Ctrl-C", "cancel"])
def test_the_end_of_a_series_is_one_of_all_its_members(work: Path, how: str) -> None:
    (work / "s.py").write_text("import time; open('begun', 'a').close(); time.sleep(120)")
    process, series = begin("--scalability-nproc", "1", "--repeats", "2", "s.py")
    wait_for((work / "begun").exists)
    if how == "cancel":
        assert phalanx("cancel", series).count("which was PENDING") == 3
    else:
        process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (130 if how == "Ctrl-C" else 143)  # 128 + the signal's number
    assert said.count("run directory") == 1
    assert f"series {series}: 0 of 4 runs completed, " in said
    assert f"phalanx retry {series}" in said
    assert "phalanx report" not in said
    assert states(series) == {"s-ddp-1x1": "CANCELLED", "s-fsdp-1x1": "CANCELLED"}
