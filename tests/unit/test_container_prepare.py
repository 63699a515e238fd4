"""`phalanx container prepare` where something goes wrong; the image and its pip are made up."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from phalanx.containers import prepare, probe
from phalanx.containers.wrap import packages
from phalanx.errors import PlanError

from .test_containers import plan

LACKS = {"python": "3.11.7", "torch": "2.9", "worker": None, "api": "No module named 'pydantic'"}


@pytest.fixture
def image(tmp_path, monkeypatch):
    """An image whose API works once its folder has pydantic; gives what the image's pip is to do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe, "ask", lambda made, anew=False: answer(made))
    pip = {"does": install}
    monkeypatch.setattr(probe, "run_inside", lambda made, words, part: pip["does"](Path(part)))
    return pip


def answer(made):
    return {**LACKS, "api": None} if (packages(made) / "pydantic").is_dir() else LACKS


def ended(code):
    return subprocess.CompletedProcess((), code)


def install(part):
    (part / "made/lib/site-packages/pydantic").mkdir(parents=True)
    return ended(0)


def saying(text, code=1):
    def fail(part):
        (part / "pip.log").write_text(text)
        return ended(code)

    return fail


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def test_one_that_was_slower_than_another_takes_what_that_made(image, tmp_path):
    """Both begin before there is a folder; a rename onto a folder with something in it fails."""

    def meanwhile(part):
        (tmp_path / "i.sif.phalanx/pydantic").mkdir(parents=True)
        return install(part)

    image["does"] = meanwhile
    assert prepare.prepare(plan(tmp_path), None, ()) == tmp_path / "i.sif.phalanx"
    assert left(tmp_path) == ["i.sif.phalanx"]


def test_one_that_was_slower_than_another_for_another_image_is_refused(image, tmp_path):
    def meanwhile(part):
        (tmp_path / "i.sif.phalanx/other").mkdir(parents=True)
        return install(part)

    image["does"] = meanwhile
    with pytest.raises(PlanError, match=r"i\.sif\.phalanx doesn't fit"):
        prepare.prepare(plan(tmp_path), None, ())
    assert left(tmp_path) == ["i.sif.phalanx"]


@pytest.fixture
def default_signals():
    """Whatever this process was started with: under nohup it ignores SIGHUP."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_half_made(image, tmp_path, number, default_signals):

    def killed(part):
        install(part)
        os.kill(os.getpid(), number)
        return ended(0)

    image["does"] = killed
    with pytest.raises(SystemExit) as caught:
        prepare.prepare(plan(tmp_path), None, ())
    assert caught.value.code == 128 + number
    assert left(tmp_path) == []
    assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("The user requested (constraint) rich==9.0.0\nERROR: ResolutionImpossible: for help",
         ["rich==9.0.0 of ", "i.sif", "rich>=13.0", "definition"]),
        ("OSError: [Errno 28] No space left on device", [" is full: make room", "container.packages"]),
        ("ERROR: No matching distribution found for pydantic", ["no network", "pip download", "--wheelhouse"]),
    ],
)  # fmt: skip
def test_why_pip_failed_is_told(image, tmp_path, log, words):
    image["does"] = saying(log)
    with pytest.raises(PlanError) as caught:
        prepare.prepare(plan(tmp_path), None, ())
    for word in words:
        assert word in str(caught.value)
    assert ("network" in str(caught.value)) == ("network" in " ".join(words))
    assert left(tmp_path) == []


def test_a_disk_that_is_full_after_pip_is_no_traceback(image, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(prepare, "_gathered", full)
    with pytest.raises(PlanError, match="No space left on device"):
        prepare.prepare(plan(tmp_path), None, ())
    assert left(tmp_path) == []


def test_a_file_in_the_folders_place_is_named(image, tmp_path):
    (tmp_path / "p").touch()
    with pytest.raises(PlanError, match=r"container\.packages=.*/p is a file: expected a folder"):
        prepare.prepare(plan(tmp_path, "container.packages=p"), None, ())


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        ((), "`phalanx container prepare {}/i.sif`"),
        (("python=/opt/conda/bin/python", "container.packages=p"),
         "`phalanx container prepare python=/opt/conda/bin/python container.packages={}/p {}/i.sif`"),
        (("container.binds=/usr", "container.pre=x"),
         "`phalanx container prepare {}/i.sif` (with -c and your job file, for its container.binds and .pre)"),
    ],
)  # fmt: skip
def test_the_command_that_is_named_prepares_for_the_same_ranks(tmp_path, settings, command):
    """Another Python of the image's would get packages that don't fit, and the next error would name it again."""
    command = command.replace("{}", str(tmp_path))
    made = plan(tmp_path, *settings)
    assert f": {command} puts it beside the image" in probe.lacks_api(made, LACKS)
    packages(made).mkdir()
    assert f"remove that folder, then {command} makes it anew" in probe.lacks_api(made, LACKS)
