"""What an environment was built with, and whether a job has the same: read from its record, in a millisecond."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bootstrap import RECORD, UNFINISHED, python_in
from ..config.slurm_schema import ModulesSettings


def environment_warnings(
    venv: str | Path, modules: ModulesSettings, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Sentences on how a job with `modules`, submitted from `environ`, differs from what built `venv`.

    Nothing is said of an environment without a record: Phalanx didn't make it.
    """
    venv = Path(venv)
    if (venv / UNFINISHED).exists():
        return [f"{venv} is not finished: its making goes on, or was broken off"]
    try:
        record = json.loads((venv / RECORD).read_text(encoding="utf-8"))
        built, load = [str(name) for name in record["modules"]], record.get("load")
        python = str(record["python"])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError):
        return [f"{venv / RECORD} can't be read: what the environment was built with is unknown"]
    # The modules that a module loads by itself are in the record, but not in a job's settings.
    must = load if load is not None else built if not modules.load else []
    found = compare_modules(built, job_modules(modules, environ), must)
    return [f"{venv}: {problem}; build it anew, or change modules" for problem in found] + _python(venv, python)


def job_modules(modules: ModulesSettings, environ: Mapping[str, str]) -> list[str]:
    """What will be loaded in a job, in order: the submitting shell's modules travel with it unless it purges them."""
    loaded = [name for name in environ.get("LOADEDMODULES", "").split(":") if name]
    for verb, words in modules.steps:
        if verb == "purge":
            loaded = []
        elif verb == "load":
            loaded += [name for name in words if name not in loaded]
        elif verb == "unload":
            loaded = [name for name in loaded if not any(_same(word, name) for word in words)]
    return loaded


def compare_modules(built: Sequence[str], job: Sequence[str], must: Iterable[str]) -> list[str]:
    """How `job` differs from `built`; of `built`, the job must have `must`. A name without a version fits any."""
    found, places = [], []
    for name in job:
        place = next((index for index, other in enumerate(built) if _same(name, other)), None)
        if place is not None:
            places.append(place)
            continue
        others = [other for other in built if _base(other) == _base(name)]
        found.append(f"built with {others[0]}, the job loads {name}" if others else f"built without {name}")
    bases = {_base(name) for name in job}
    missing = [name for name in must if _base(name) not in bases]
    if missing:
        found.append(f"built with {', '.join(missing)}, not loaded in the job")
    if places != sorted(places):
        order = ", ".join(built[place] for place in sorted(places))
        found.append(f"built with modules in the order {order}, the job loads {', '.join(job)}")
    return found


def _same(asked: str, loaded: str) -> bool:
    """`CUDA`, `CUDA/12` and `CUDA/12.1` all ask for `CUDA/12.1`."""
    return loaded == asked or loaded.startswith((f"{asked}/", f"{asked}.", f"{asked}-"))


def _base(name: str) -> str:
    """A module's name without its version."""
    head, slash, version = name.rpartition("/")
    return head if slash and re.search(r"\d", version) else name


def _python(venv: Path, recorded: str) -> list[str]:
    """Whether the interpreter is still there, and still the one: a system or module update changes it."""
    python = python_in(venv)
    if not python.exists():
        home = _settings(venv).get("home", "unknown")
        return [f"{venv}: its python is gone (it was {recorded} in {home}); is its module's folder here? else rebuild"]
    now = re.fullmatch(r"python(\d+\.\d+)", python.resolve().name)
    if now and now[1] != ".".join(recorded.split(".")[:2]):
        return [f"{venv}: built with python {recorded}, which is now {now[1]}: build it anew"]
    return []


def _settings(venv: Path) -> dict[str, Any]:
    """pyvenv.cfg's lines."""
    try:
        lines = (venv / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)}
