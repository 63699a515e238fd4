"""What is decided on a dry run without ranks: which scripts have no run to shorten, and who passes it over."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.options import scan
from phalanx.config import load_config
from phalanx.errors import UsageError
from phalanx.planning.uses_api import may_use_api
from phalanx.records import Exit, RecordWriter, Start, Step
from phalanx.report.read.runs import read_run
from phalanx.rundir import mark_dry
from phalanx.script.epoch_timer import EpochTimer

SCRIPTS = {
    "import torch\nfor x in []: pass": False,
    "import os, sys\nimport torch.nn as nn\nfrom torch.utils.data import DataLoader": False,
    "import phalanx": True,
    "def main():\n    from phalanx import init": True,
    "import helper": True,  # which imports it
    "from tools import deep": True,
    "from tools.deep import f": True,
    "import other": False,
    "from tools import shallow": False,
    "import somebodys_package": True,  # it may
    "import importlib\nimportlib.import_module('phal' + 'anx')": True,
    "exec(open('x').read())": True,
    "import torch\nmodel.eval()": False,
    "this is no python": True,  # running it will say so
}


@pytest.mark.parametrize("text", SCRIPTS)
def test_a_script_is_refused_only_where_it_certainly_makes_no_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "helper.py").write_text("import json\nimport phalanx as px\n")
    (tmp_path / "other.py").write_text("import other, math\n")
    (tmp_path / "tools/__init__.py").write_text("")
    (tmp_path / "tools/deep.py").write_text("from .inner import f\n")
    (tmp_path / "tools/inner.py").write_text("from phalanx import init\ndef f(): init()\n")
    (tmp_path / "tools/shallow.py").write_text("from . import __name__\n")
    script = tmp_path / "train.py"
    script.write_text(text)
    assert may_use_api(script, [tmp_path]) == SCRIPTS[text]


def test_the_option_stands_before_the_script() -> None:
    before = scan(["--dry-run", "train.py", "--epochs", "3"], script=True)
    assert (before.overrides, before.args) == ((("dry_run", "true"),), ("--epochs", "3"))
    after = scan(["train.py", "--dry-run"], script=True)
    assert (after.overrides, after.args) == ((), ("--dry-run",))


@pytest.mark.parametrize(("text", "meant"), [("1", True), ("true", True), ("0", False), ("no", False)])
def test_the_variable_sets_it(text: str, meant: bool) -> None:
    assert load_config(environ={"PHALANX_DRY_RUN": text}).config.dry_run == meant


def start(dry: bool) -> Start:
    return Start(1, 0, 0, "host", 1, "cpu", "single", {}, num_nodes=1, dry=dry)


@pytest.mark.parametrize("dry", [False, True])
def test_a_report_leaves_dry_runs_out(tmp_path: Path, dry: bool) -> None:
    writer = RecordWriter(tmp_path, 0, 1)
    writer.write(start(dry))
    for step in range(1, 4):
        writer.write(Step(step=step, epoch=0, seconds=0.1, wait=0.0, samples=1))
    writer.write(Exit(3, 1.0, "", dry))
    writer.close()
    run, looked_at = read_run(tmp_path)
    assert (run is None) == dry
    assert any("dry run" in reason for reason in looked_at.left_out) == dry


def test_an_epoch_timer_is_refused_before_it_times_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark_dry(tmp_path)
    monkeypatch.setenv("PHALANX_RUN_DIR", str(tmp_path))
    with pytest.raises(UsageError, match="dry run"):
        EpochTimer("ddp")
    assert not (tmp_path / "records").exists()
