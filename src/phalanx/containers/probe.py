"""What can be known of an image before a job waits for it: that it is there, and holds what ranks need."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from ..errors import PlanError
from ..plan import LaunchPlan
from ..records import VERSION
from .wrap import inside, parts

_PATIENCE = 120.0  # seconds; the first look at an image on a slow file system takes long
_PROBE = """\
import json, importlib.util, sys
from importlib.metadata import PackageNotFoundError, version
def of(name):
    try:
        return version(name) if importlib.util.find_spec(name) else None
    except (PackageNotFoundError, ValueError):
        return "unknown" if importlib.util.find_spec(name) else None
found = {name: of(name) for name in ("torch", "phalanx", "horovod", "deepspeed", "mpi4py")}
if found["phalanx"]:
    from phalanx.records import VERSION
    found["records"] = VERSION
found["python"] = sys.version.split()[0]
print("PROBE" + json.dumps(found))
"""


def check(plan: LaunchPlan) -> None:
    """Raise PlanError for an image or bind that isn't there. Without a container there is nothing to check."""
    if plan.runtime == "venv":
        return
    config = plan.config.container
    image = config.image or ""
    if "://" in image:
        raise PlanError(
            f"container.image={image!r}: each rank would pull it for itself; pull it once with `phalanx container pull "
            f"{image}`, and give the .sif file"
        )
    if not Path(plan.cwd, image).exists():
        raise PlanError(
            f"container.image={image!r}: there is no such image; `phalanx container pull` or `phalanx container build` "
            "makes one"
        )
    for bind in config.binds:
        source, *_ = parts(bind)
        if not Path(plan.cwd, source).exists():
            raise PlanError(
                f"container.binds has {bind!r}: {source} is not there, and a container without it doesn't start; "
                "correct the folder, or leave it out"
            )


def look(plan: LaunchPlan) -> list[str]:
    """Run a probe in the image; returns what to tell the user.

    Raises PlanError if the image can't be started or lacks torch or Phalanx of these records. Where this machine has no
    container runtime the image can't be looked into, and that is told.
    """
    program = plan.config.container.executable or plan.runtime
    if shutil.which(program) is None:
        return [f"{program} is not on PATH here, so the image was not looked into"]
    script = inside(plan, [plan.python, "-c", _PROBE])
    environ = {**os.environ, "PHALANX_RUN_DIR": plan.cwd}
    try:
        done = subprocess.run(
            ["bash", "-c", script], env=environ, cwd=plan.cwd, capture_output=True, text=True, errors="replace",
            timeout=_PATIENCE, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [f"the image gave no answer in {_PATIENCE:.0f} s, so it was not looked into"]
    answer = re.search(r"^PROBE(\{.*\})$", done.stdout, re.MULTILINE)
    if answer is None:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise PlanError(
            f"{plan.config.container.image}: {plan.python} does not run in it (exit code {done.returncode}): "
            f"{words[-1] if words else 'no word why'}"
        )
    return _judge(plan, json.loads(answer[1]))


def _judge(plan: LaunchPlan, found: dict[str, object]) -> list[str]:
    image = plan.config.container.image
    if plan.script is None:
        return []  # a command of the user's own needs nothing of ours
    missing = [name for name in ("torch", "phalanx") if not found.get(name)]
    if missing:
        raise PlanError(
            f"{image} holds no {' and no '.join(missing)} for {plan.python} (Python {found['python']}): install it in "
            "the image (phalanx container definition shows how), bind a folder that has it, or set python"
        )
    if found.get("records") != VERSION:
        raise PlanError(
            f"{image} has a Phalanx ({found['phalanx']}) that writes records of version {found.get('records')}, and "
            f"this one reads version {VERSION}: install the same release in both"
        )
    return [f"image: torch {found['torch']}, phalanx {found['phalanx']}, Python {found['python']}"]
