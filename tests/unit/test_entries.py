"""Names that written job scripts call, whatever folder holds what they do."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx

SOURCE = Path(phalanx.__file__).parent
# Each with arguments and what the end of its output then says: a script of an earlier version must find it.
ENTRIES = {
    "worker": ((), "usage: python -m phalanx.worker SCRIPT"),
    "ports": (("7",), ""),
    "report_failure": (("/nowhere", "1"), ""),
    "claims": (("/nowhere",), ""),
    "ray_launch": (("--", "phalanx.worker"), ""),
    "bootstrap": (("--help",), "--wheelhouse DIR"),
}
THIN = ("worker", "ports", "report_failure")  # the others are packages, or files that are copied


@pytest.mark.parametrize("name", ENTRIES)
def test_written_scripts_find_their_entries(name: str, tmp_path: Path) -> None:
    arguments, says = ENTRIES[name]
    words = [
        sys.executable,
        "-m",
        f"phalanx.{name}",
        *(str(tmp_path) + word if word[0] == "/" else word for word in arguments),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    text = done.stdout + done.stderr
    assert f"No module named phalanx.{name}" not in text
    assert "cannot be directly executed" not in text
    assert says in text
    if name == "ports":
        assert 1024 < int(done.stdout) < 65536


@pytest.mark.parametrize("name", THIN)
def test_entries_are_thin(name: str) -> None:
    tree = ast.parse((SOURCE / f"{name}.py").read_text(encoding="utf-8"))
    assert not [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
