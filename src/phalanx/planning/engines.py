"""DeepSpeed, Horovod and Ray as packages of the ranks' environment: are they there, and fit for the plan?"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from ..config.deepspeed import engine_config
from ..config.global_batch import share_of_rank
from ..errors import MissingExtraError, PlanError
from ..rank.horovod_ranks import built_with
from .plan import LaunchPlan

_PACKAGES = {"deepspeed": "deepspeed", "horovod": "horovod", "horovodrun": "horovod", "ray": "ray"}


_LOOK = """
import sys
from importlib.util import find_spec
spec = find_spec(sys.argv[1])
print((spec.submodule_search_locations or [""])[0] if spec else "")
"""


def check(plan: LaunchPlan) -> None:
    """Refuse what the ranks would fail at, as far as it can be seen from here: not in an image, nor with a Python that
    only the nodes have.

    Raises MissingExtraError, PlanError or ConfigError.
    """
    if plan.config.global_batch:
        share_of_rank(plan.config, plan.world_size)
    if plan.strategy == "deepspeed":
        engine_config(plan.config)
    for name in dict.fromkeys(_PACKAGES[word] for word in (plan.strategy, plan.launcher) if word in _PACKAGES):
        found = _look(plan, name)
        if found == "":
            raise MissingExtraError(
                f"{_what(plan, name)} needs {name}, which {plan.python} doesn't have: {_remedy(name)}"
            )
        if found and plan.strategy == name == "horovod":
            _check_horovod(plan, Path(found))
    if plan.local and plan.launcher == "mpirun" and shutil.which(plan.config.mpirun.executable) is None:
        raise PlanError(
            f"launcher mpirun needs {plan.config.mpirun.executable}, which is not on PATH: install or load an MPI, or "
            "use another launcher"
        )


def _look(plan: LaunchPlan, package: str) -> str | None:
    """The folder of a package as the ranks' own Python finds it (it knows its paths); empty if it doesn't; None if that
    Python can't be asked here."""
    return folder_of(plan.python, package) if plan.runtime == "venv" and not _unknown(plan) else None


def _unknown(plan: LaunchPlan) -> bool:
    """Whether only the job's shell knows which Python it is."""
    config = plan.config
    return "/" not in plan.python and bool(
        config.conda or config.before or config.pre_exec_file or config.modules.steps
    )


def folder_of(python: str, package: str) -> str | None:
    """The same for any Python."""
    try:
        done = subprocess.run([python, "-c", _LOOK, package], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _what(plan: LaunchPlan, name: str) -> str:
    return f"strategy {plan.strategy}" if _PACKAGES.get(plan.strategy) == name else f"launcher {plan.launcher}"


def _remedy(name: str) -> str:
    if name == "horovod":
        return "phalanx env create PATH --with horovod builds it (docs/engines.md)"
    return f"pip install 'phalanx[{name}]'"


def _check_horovod(plan: LaunchPlan, found: Path) -> None:
    built = built_with(found)
    if plan.launcher == "mpirun" and "mpi" not in built:
        raise PlanError(
            f"launcher mpirun with strategy horovod: Horovod in {found} is built without MPI, and each process would "
            "train alone: use --launcher srun or horovodrun, or build it with HOROVOD_WITH_MPI=1"
        )
    by_mpi = plan.launcher == "mpirun" or (plan.launcher == "srun" and plan.config.mpi not in (None, "none"))
    if plan.config.horovod.use_adasum and not (by_mpi and "mpi" in built):
        raise PlanError(
            f"horovod.use_adasum needs Horovod with MPI, and {plan.launcher} starts it with gloo: use mpirun "
            "(or srun with mpi set) and a build with HOROVOD_WITH_MPI=1, or use_adasum=false"
        )
    if plan.launcher == "horovodrun" and "gloo" not in built:
        raise PlanError(
            f"launcher horovodrun: Horovod in {found} is built without gloo: use --launcher mpirun or srun, or build "
            "it with HOROVOD_WITH_GLOO=1"
        )
