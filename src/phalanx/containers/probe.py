"""What can be known of an image before a job waits for it: that it is there, and holds what ranks need."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from ..config import JobConfig
from ..errors import PlanError
from ..planning.plan import LaunchPlan
from ..shell import Sh, Word, exports, render
from . import needs
from .wrap import image_of, inside, on_host, packages, parts

_PATIENCE = 120.0  # seconds; the first look at an image on a slow file system takes long
_LAST = 4  # lines that are shown of a failure, where lines of the user's come before
_NO_PYTHON = """: set python to the image's interpreter, by its path there (such as /opt/conda/bin/python), or put \
it on PATH by container.pre; an image without a Python from 3.8 can't be used"""
_known: dict[str, dict[str, Any]] = {}
_OLDEST, _OLDEST_API = (3, 8), (3, 10)
_OLDEST_TORCH = (2, 7)
_OLD_API = {"PhalanxError", "Topology", "__version__", "errors", "topology", "worker"}  # of 3.8 too
# For any Python 3; this package is the bound one, whose worker is all that a plain script needs.
_PROBE = """\
import json, sys
found = {"python": "%d.%d.%d" % sys.version_info[:3]}
def of(name):
    from importlib.metadata import version
    from importlib.util import find_spec
    try:
        return version(name) if find_spec(name) else None
    except Exception:
        return "unknown" if find_spec(name) else None
def problem(module):
    try:
        __import__(module)
    except Exception as error:
        return "%s: %s" % (type(error).__name__, error)
if sys.version_info >= (3, 8):
    found.update((name, of(name)) for name in ("torch", "horovod", "deepspeed", "ray", "pip"))
    found.update(worker=problem("phalanx.worker"), api=problem("phalanx.config.loader"))
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
    if not Path(image_of(plan)).exists():
        raise PlanError(
            f"container.image={image!r}: there is no such image; `phalanx container pull` or `phalanx container build` "
            "makes one"
        )
    for bind in config.binds:
        source, *_ = parts(bind)
        if not Path(on_host(plan, source)).exists():
            raise PlanError(
                f"container.binds has {bind!r}: {source} is not there, and a container without it doesn't start; "
                "correct the folder, or leave it out"
            )


def look(plan: LaunchPlan) -> list[str]:
    """Run a probe in the image, as its ranks would be run; returns what to tell the user.

    Raises PlanError if the image can't be started, or lacks what the launcher or the script certainly needs. Where this
    machine has no container runtime the image can't be looked into, and that is told.
    """
    config = plan.config
    if config.exec_command or config.exec_file:
        return []  # the user's own lines start what they like
    program = config.container.executable or plan.runtime
    if shutil.which(program) is None:
        return [f"{program} is not on PATH here, so the image was not looked into"]
    try:
        found = ask(plan)
        return [f"image: {_versions(found)}", *_judge(plan, found)]
    except subprocess.TimeoutExpired:
        return [f"the image gave no answer in {_PATIENCE:.0f} s, so it was not looked into"]
    except PlanError as error:
        if plan.local or plan.allocation or not _changed_in_job(config):
            raise
        return [f"{error} (or the job's own lines before it change what the runtime sees)"]


def ask(plan: LaunchPlan, anew: bool = False) -> dict[str, Any]:
    """What the probe found, once for all plans of the same image and variables, unless it's to be looked at `anew`.

    Raises PlanError if the image's Python can't be run, subprocess.TimeoutExpired."""
    same = {**plan.environment, "PHALANX_EXPECTED_WORLD_SIZE": ""}
    key = f"{plan.python} {plan.runtime} {plan.cwd} {plan.config.container} {plan.config.tmpdir} {same}"
    if anew or key not in _known:
        _known[key] = _ask(plan)
    return _known[key]


def _ask(plan: LaunchPlan) -> dict[str, Any]:
    done = run_inside(plan, [plan.python, "-c", _PROBE], plan.cwd, timeout=_PATIENCE, capture_output=True)
    answer = re.search(r"^PROBE(\{.*\})$", done.stdout, re.MULTILINE)
    if answer is None:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        words = [word for word in words if not word.startswith(("WARNING:", "INFO:"))] or words
        said = "\n  ".join(words[-_LAST if plan.config.container.pre else -1 :]) or "no word why"
        raise PlanError(
            f"{plan.config.container.image}: {plan.python} does not run in it (exit code {done.returncode}): {said}"
            f"{_NO_PYTHON if done.returncode in (126, 127) else ''}"
        )
    found: dict[str, Any] = json.loads(answer[1])
    return found


def run_inside(plan: LaunchPlan, words: list[Word], run_dir: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run words in the image here and now, in an environment as the ranks'; shell text of `env` is evaluated.

    `run_dir` is bound as theirs is."""
    shell_text = {name: value for name, value in plan.environment.items() if isinstance(value, Sh)}
    literal = {name: value for name, value in plan.environment.items() if isinstance(value, str)}
    script = "\n".join([*exports(shell_text), inside(plan, words)])
    environ = {**os.environ, **literal, "PHALANX_RUN_DIR": run_dir}
    return subprocess.run(
        [shutil.which("bash") or "bash", "-c", script], env=environ, cwd=plan.cwd, text=True, errors="replace",
        check=False, stdin=subprocess.DEVNULL, **options,
    )  # fmt: skip


def _changed_in_job(config: JobConfig) -> bool:
    """Whether lines that only the job runs may bind folders or set variables of the runtime."""
    loaded = " ".join(word for _, words in config.modules.steps for word in words)
    text = f"{config.before or ''} {config.pre_exec_file or ''} {loaded}".lower()
    return bool(config.pre_exec_file) or re.search("apptainer|singularity", text) is not None


def _versions(found: dict[str, Any]) -> str:
    return f"torch {found.get('torch') or 'none'}, Python {found['python']}"


def _judge(plan: LaunchPlan, found: dict[str, Any]) -> list[str]:
    image, python = plan.config.container.image, found["python"]
    old = _version(python) < _OLDEST
    if old or found["worker"]:
        why = "ranks need 3.8 or newer" if old else f"ranks fail at {found['worker']}"
        raise PlanError(
            f"{image}: {plan.python} is Python {python}, and {why}: set python to another interpreter of the image's"
        )
    need = needs.of(plan)
    missing = sorted(name for name in need.packages if name in found and not found[name])
    if missing:
        raise PlanError(
            f"{image} holds no {' and no '.join(missing)} for {plan.python} (Python {python}), which "
            f"{_who(plan, missing[0])} needs: use an image that has it, bind a folder that has it, install it in the "
            "image (phalanx container definition shows how), or set python"
        )
    if (need.settings and found["api"]) or (need.api - _OLD_API and too_old(found)):
        raise PlanError(f"{plan.script} uses the API, and {lacks_api(plan, found)}")
    if need.settings and found["torch"] and _version(found["torch"]) < _OLDEST_TORCH:
        return [f"{image} has torch {found['torch']}, and the API was tried from 2.7 on"]
    return []


def _version(text: str) -> tuple[int, ...]:
    """The first two numbers; of an unknown version none is missing."""
    numbers = re.match(r"(\d+)\.(\d+)", text)
    return tuple(map(int, numbers.groups())) if numbers else (99,)


def _who(plan: LaunchPlan, package: str) -> str:
    if package in (plan.strategy, plan.launcher) or (package, plan.launcher) == ("horovod", "horovodrun"):
        return f"launcher {plan.launcher} with strategy {plan.strategy}"
    return "launcher torchrun" if plan.launcher == "torchrun" else str(plan.script)


def too_old(found: dict[str, Any]) -> bool:
    """Whether the API can't be had with the image's Python."""
    return _version(found["python"]) < _OLDEST_API


def lacks_api(plan: LaunchPlan, found: dict[str, Any]) -> str:
    """What is wrong with an image for scripts with the API, and what to do."""
    image, folder = plan.config.container.image, packages(plan)
    if too_old(found):
        return (
            f"{image} has Python {found['python']} as {plan.python}, where the API needs 3.10 or newer: use another "
            "image, or a script without the API, which runs as it is"
        )
    if folder.is_dir():
        return f"{folder} doesn't fit {image} ({found['api']}): remove that folder, then {_prepare(plan)} makes it anew"
    return f"{image} lacks what it needs beside torch ({found['api']}): {_prepare(plan)} puts it beside the image, once"


def _prepare(plan: LaunchPlan) -> str:
    """The command that prepares for the ranks of this plan: by its Python, with the settings that the image needs."""
    config = plan.config.container
    said = [*([f"runtime={plan.runtime}"] if plan.runtime != "apptainer" else [])]
    said += [f"python={plan.python}"] if plan.python != "python3" else []
    said += [f"container.packages={packages(plan)}"] if config.packages else []
    words = render(["phalanx", "container", "prepare", *said, config.image or ""])
    others = [name for name in ("binds", "args", "pre", "home", "executable") if getattr(config, name)]
    with_file = f" (with -c and your job file, for its container.{' and .'.join(others)})" if others else ""
    return f"`{words}`{with_file}"
