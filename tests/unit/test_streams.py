"""What the command prints reaches any stdout: every encoding, a reader that has gone, a full disk, a closed stream."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.main import COMMANDS, main
from phalanx.registry import LAUNCHERS, STRATEGIES


@pytest.fixture
def say(monkeypatch, tmp_path):
    """The command with stdout and stderr of an encoding that stops at what it hasn't: both texts, and the exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "COLUMNS": "20"})

    def run(encoding, *words):
        streams = [io.TextIOWrapper(io.BytesIO(), encoding, "strict") for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", streams[0])
            patch.setattr(sys, "stderr", streams[1])
            code = main(list(words))
        for stream in streams:
            stream.flush()
        return code, *(stream.buffer.getvalue().decode(encoding) for stream in streams)

    return run


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_every_command_speaks_in_any_encoding(say, encoding):
    for name in COMMANDS:
        assert say(encoding, name, "--help")[0] == 0, name
    Path("job→.yaml").write_text("job_name: jöb→名\n", encoding="utf-8")
    code, out, _ = say(encoding, "plan", "-c", "job→.yaml", "train→.py")
    assert code == 0
    assert "train" in out
    assert say(encoding, "config", "-c", "job→.yaml", "--explain")[0] == 0
    code, _, err = say(encoding, "röport→")
    assert code == 2
    expected = {"ascii": "r\\xf6port->", "latin-1": "röport->", "cp1252": "röport->", "utf-8": "röport→"}
    assert f"unknown command '{expected[encoding]}'" in err


def test_a_report_is_told_in_ascii_too(say):
    pytest.importorskip("matplotlib")
    rows = [f"ddp,{nodes},{epoch},{10 / nodes}" for nodes in (1, 2) for epoch in range(3)]
    Path("t.csv").write_text("\n".join(["name,nodes,epoch_id,time", *rows]) + "\n")
    code, out, _ = say("ascii", "report", "t.csv")
    assert code == 0
    assert "-> 2 nodes, the largest that was run, is worth it" in " ".join(out.split())
    assert Path("scalability-report/report.html").exists()


def shell(line: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m phalanx"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PHALANX": command}
    return subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("$PHALANX --help >/dev/full", 1, "error: stdout can't be written: No space left on device\n"),
        ("$PHALANX run --help >&-", 0, ""),
        ("$PHALANX config --explain >&- 2>&-", 0, ""),
        ("set -o pipefail; $PHALANX config --explain | head -c1 >/dev/null || [ $? = 141 ]", 0, ""),
        ("PYTHONIOENCODING=ascii:strict $PHALANX röport 2>&1 | grep -c Traceback", 1, ""),
    ],
)
def test_a_stdout_that_takes_nothing_is_no_traceback(line, code, said):
    done = shell(line)
    assert (done.returncode, done.stderr) == (code, said)


def test_lists_of_strategies_and_launchers_are_whole(capsys):
    found = set()
    for name in COMMANDS:
        main([name, "--help"])
        for option, listed in re.findall(r"--(strategy|launcher) NAME +(.*)", capsys.readouterr().out):
            table = STRATEGIES if option == "strategy" else LAUNCHERS
            names = set(re.findall(r"\w+", listed)) & set(table)
            assert not names or names == set(table), (name, listed)
            found |= {(option, name)} if names else set()
    assert {(option, name) for option in ("strategy", "launcher") for name in ("run", "plan", "submit")} <= found
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert [name for name in (*STRATEGIES, *LAUNCHERS) if f"`{name}`" not in readme] == []
