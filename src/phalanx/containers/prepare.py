"""What the API needs beyond torch, put once beside an image by its own Python and pip."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .. import bound
from ..errors import PlanError
from ..plan import LaunchPlan
from ..shell import Word, render
from . import probe
from .wrap import packages

_NO_PIP = 91
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
    if folder.exists() or probe.too_old(found):
        raise PlanError(probe.lacks_api(plan, found))
    if wheelhouse and not any(Path(wheelhouse).glob("*.whl")):
        raise PlanError(f"--wheelhouse {wheelhouse}: expected a folder of wheels; {_fill(wheelhouse, found['python'])}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise PlanError(
            f"{folder} can't be made ({error.strerror}): set container.packages=DIR, in the job file too"
        ) from None
    try:
        _install(plan, part, wheelhouse, options, found["python"])
        made = _gathered(part)
        made.chmod(0o777 & ~_umask())
        _check(plan, made)
        made.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _install(plan: LaunchPlan, part: Path, wheelhouse: str | None, options: Sequence[str], python: str) -> None:
    words = ["--no-cache-dir", *options, *bound.REQUIREMENTS]
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
        raise PlanError(
            f"pip failed with exit code {code}, see its output above. Where there is no network: "
            f"{_fill(wheelhouse or 'wheels', python)}"
        )


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
