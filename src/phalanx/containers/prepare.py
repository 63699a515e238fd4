"""What the API needs beyond torch, put once beside an image by its own Python and pip."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from .. import bound
from ..errors import PlanError
from ..planning.plan import LaunchPlan
from ..shell import Word, render
from . import probe
from .wrap import packages

_NO_PIP = 91
_LOG = "pip.log"
_LEAST = 100_000  # bytes, with which nothing more can be written
# In the image: what is installed stays as it is, and counts; what is missing goes to a folder.
_INSTALL = """\
import re, subprocess, sys
from importlib.metadata import distributions
from importlib.util import find_spec
folder, no_pip, options = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
with open(folder + "/installed.txt", "w") as file:
    for one in distributions():
        line = "{}=={}".format(one.metadata["Name"], one.version)
        if re.match(r"[A-Za-z0-9][\\w.-]*==\\d+(\\.\\d+)*((a|b|rc|\\.post|\\.dev)\\d+)*(\\+[\\w.]+)?$", line):
            file.write(line + "\\n")
if not find_spec("pip"):
    sys.exit(no_pip)
words = ["--prefix", folder + "/made", "--no-warn-script-location", "--constraint", folder + "/installed.txt"]
sys.exit(subprocess.call([sys.executable, "-m", "pip", "install"] + words + options))
"""
_FILES = ("PIP_CERT", "PIP_CONFIG_FILE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")  # of pip's, on the host
_FOREIGN = ("PIP_TARGET", "PIP_PREFIX", "PIP_CONSTRAINT", "PIP_REQUIRE_VIRTUALENV")


def prepare(plan: LaunchPlan, wheelhouse: str | None, options: Sequence[str]) -> Path | None:
    """Make the folder; None if nothing is missing. `options` are pip's.

    Raises PlanError if the image's Python is too old, a folder is in the way, or pip fails.
    """
    found = probe.ask(plan)
    if not found.get("api", "unknown"):
        return None
    folder = packages(plan)
    if folder.exists() and not folder.is_dir():
        raise PlanError(f"container.packages={folder} is a file: expected a folder, which must not be there yet")
    if folder.exists() or probe.too_old(found):
        raise PlanError(probe.lacks_api(plan, found))
    if wheelhouse and not any(Path(wheelhouse).glob("*.whl")):
        raise PlanError(f"--wheelhouse {wheelhouse}: expected a folder of wheels; {_fill(wheelhouse, found['python'])}")
    with _ended_cleanly(), _made_beside(folder) as part:
        _install(plan, part, wheelhouse, options, found["python"])
        made = _gathered(part)
        made.chmod(0o777 & ~_umask())
        _check(plan, made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            # Another such command was quicker; what it made is as good if it fits.
            if (found := probe.ask(plan, anew=True)).get("api", "unknown"):
                raise PlanError(probe.lacks_api(plan, found)) from None
    return folder


@contextmanager
def _made_beside(folder: Path) -> Iterator[Path]:
    """A folder for what is not whole yet, which goes in any case."""
    part = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        yield part
    except OSError as error:
        raise PlanError(
            f"{folder} can't be made ({error.strerror}): set container.packages=DIR, in the job file too"
        ) from None
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _ended_cleanly() -> Iterator[None]:
    """SIGTERM and SIGHUP (of a terminal that is closed) end what is inside as an exception does."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _install(plan: LaunchPlan, part: Path, wheelhouse: str | None, options: Sequence[str], python: str) -> None:
    words = ["--no-cache-dir", "--log", str(part / _LOG), *options, *bound.REQUIREMENTS]
    if wheelhouse:
        words = ["--no-index", "--find-links", str(Path(plan.cwd, wheelhouse)), *words]
    named = [os.environ[name] for name in _FILES if Path(os.environ.get(name) or "/").is_file()]
    binds = [*([str(Path(plan.cwd, wheelhouse))] if wheelhouse else []), *dict.fromkeys(named)]
    own = plan.config.container
    own = own.model_copy(update={"binds": (*own.binds, *(re.sub("([,:])", r"\\\1", bind) for bind in binds))})
    pip = {name: "" for name in _FOREIGN if name in os.environ} | {"PIP_USER": "0"}
    changed = replace(
        plan,
        config=plan.config.model_copy(update={"container": own}),
        environment={**plan.environment, **_pip_settings(), **pip},
    )
    print(f"pip install {render(words)}  # by {plan.python} of {own.image}", file=sys.stderr, flush=True)
    inside: list[Word] = [plan.python, "-c", _INSTALL, str(part), str(_NO_PIP), *words]
    code = probe.run_inside(changed, inside, str(part)).returncode
    if code == _NO_PIP:
        code = _by_our_pip(part, words, python)
    if code != 0:
        raise PlanError(f"pip failed with exit code {code}: {_why(plan, part, wheelhouse, python)}")


def _why(plan: LaunchPlan, part: Path, wheelhouse: str | None, python: str) -> str:
    """What pip's log says of its failure, and what to do."""
    log = part / _LOG
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if "ResolutionImpossible" in text:
        theirs = ", ".join(dict.fromkeys(re.findall(r"user requested \(constraint\) (\S+)", text))) or "a package"
        return (
            f"{theirs} of {plan.config.container.image} doesn't go with what the API needs "
            f"({', '.join(bound.REQUIREMENTS)}), and stays as it is: build an image with Phalanx (phalanx container "
            "definition shows how), or use another"
        )
    if "No space left on device" in text or shutil.disk_usage(part).free < _LEAST:
        return f"{part.parent} is full: make room, or set container.packages=DIR, in the job file too"
    fill = _fill(wheelhouse or "wheels", python)
    return f"see its output above. Where there is no network: {fill}"


def _pip_settings() -> dict[str, str]:
    """Also under a clean environment."""
    return {name: text for name, text in os.environ.items() if name.startswith("PIP_") and name not in _FOREIGN}


def _by_our_pip(part: Path, words: Sequence[str], python: str) -> int:
    """An image without pip: this machine's takes wheels for the image's Python."""
    print(
        f"the image has no pip: {sys.executable} -m pip takes wheels for Python {python}", file=sys.stderr, flush=True
    )
    wheels = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python.rpartition(".")[0]]
    wheels += ["--constraint", str(part / "installed.txt")]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--target",
        str(part / "made" / "site-packages"),
        *wheels,
        *words,
    ]
    return subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode


def _fill(wheelhouse: str, python: str) -> str:
    wanted = render(bound.REQUIREMENTS)
    return (
        f"fill one where there is a network, by `python3 -m pip download --dest {wheelhouse} --only-binary :all: "
        f"--python-version {python.rpartition('.')[0]} {wanted}`, and give it by --wheelhouse {wheelhouse}"
    )


def _gathered(part: Path) -> Path:
    """All that pip installed, in one folder: systems have different places, and some two."""
    made = part / "packages"
    made.mkdir()
    for site in sorted([*part.glob("made/**/site-packages"), *part.glob("made/**/dist-packages")]):
        for item in site.iterdir():
            if item.name not in ("bin", "__pycache__") and not (made / item.name).exists():
                item.rename(made / item.name)
    return made


def _check(plan: LaunchPlan, made: Path) -> None:
    own = plan.config.container.model_copy(update={"packages": str(made)})
    found = probe.ask(replace(plan, config=plan.config.model_copy(update={"container": own})))
    if found["api"]:
        raise PlanError(
            f"{plan.config.container.image}: with what pip installed the API still fails ({found['api']}): a package "
            "of the image's may be too old; build an image with Phalanx (phalanx container definition shows how)"
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
