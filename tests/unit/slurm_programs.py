"""Stand-ins for Slurm's programs on PATH: each answers what a test wrote down, and keeps what it was asked."""

from __future__ import annotations

import os
from pathlib import Path

_PROGRAM = """\
#!/bin/bash
here="{folder}/{name}"
printf '%s\\n' "$*" >>"$here.calls"
env >"$here.environment"
[ -t 0 ] || cat >"$here.stdin"
[ ! -e "$here.sleep" ] || exec sleep "$(cat "$here.sleep")"
cat "$here.out" 2>/dev/null
cat "$here.err" >&2 2>/dev/null
exit "$(cat "$here.code" 2>/dev/null || echo 0)"
"""
NAMES = ("sbatch", "squeue", "scontrol", "sacct", "scancel", "sinfo")


class Programs:
    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        for name in NAMES:
            path = folder / "bin" / name
            path.write_text(_PROGRAM.format(folder=folder, name=name))
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def answer(self, name: str, out: str = "", err: str = "", code: int = 0) -> None:
        """From now on. A call that comes in between fails, or has the old answer or the new one."""
        files = [("out", out), ("err", err), ("code", str(code))]
        for kind, text in reversed(files) if code else files:
            (self.folder / f"{name}.{kind}").write_text(text)

    def hang(self, name: str, seconds: float) -> None:
        (self.folder / f"{name}.sleep").write_text(str(seconds))

    def calls(self, name: str) -> list[str]:
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []

    def environment(self, name: str) -> dict[str, str]:
        lines = (self.folder / f"{name}.environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)
