"""The settings files of tests/sites, as the batch scripts that they make."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import phalanx
from phalanx.cli import launch
from phalanx.cli.main import main
from phalanx.planning.facts import Facts

TESTS = Path(__file__).resolve().parents[1]
FACTS = Facts("login", 8, 0, "/py/bin/python", "Linux", "x86_64", cwd="/home/me/project")
RANK = Path("/py/lib/python3/site-packages/phalanx/testing/rank.py")


@pytest.mark.parametrize(
    ("site", "marker"),
    [("jsc", "torch_dist"), ("jsc", "deepspeed_dist"), ("vega", "torch_dist"), ("vega", "horovod_dist")],
)
def test_a_sites_script_is_as_the_file_that_was_read_and_agreed_on(site, marker, tmp_path, monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith(("PHALANX_", "SLURM_", "OMP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "gather", lambda *_: FACTS)
    monkeypatch.setattr("phalanx.cli.test.RANK", RANK)
    words = ["-m", marker, "-c", str(TESTS / "sites" / f"{site}.yaml"), "--submit", "--preview", "--", "tests/hpc"]
    assert main(["test", *words]) == 0
    text = capsys.readouterr().out.replace(str(Path(phalanx.__file__).parent), "/py/lib/python3/site-packages/phalanx")
    path = TESTS / "golden" / f"test-{site}-{marker}.sh"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), f"read the difference, then run with UPDATE_GOLDEN=1 ({path})"
