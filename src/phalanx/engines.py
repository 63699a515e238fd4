"""DeepSpeed, Horovod and Ray as packages of the ranks' environment: are they there, and fit for the plan?"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from .deepspeed_config import engine_config
from .errors import MissingExtraError, PlanError
from .horovod_ranks import built_with
from .plan import LaunchPlan

_PACKAGES = {"deepspeed": "deepspeed", "horovod": "horovod", "horovodrun": "horovod", "ray": "ray"}


def check(plan: LaunchPlan) -> None:
    """Refuse what the ranks would fail at, as far as it can be seen from here: not in an image, nor in an environment
    that only the nodes have.

    Raises MissingExtraError, PlanError or ConfigError.
    """
    if plan.strategy == "deepspeed":
        engine_config(plan.config)
    folders = _packages(plan)
    for name in dict.fromkeys(_PACKAGES[word] for word in (plan.strategy, plan.launcher) if word in _PACKAGES):
        if folders and not any((folder / name).is_dir() for folder in folders):
            raise MissingExtraError(
                f"{_what(plan, name)} needs {name}, which {plan.python} doesn't have: {_remedy(name)}"
            )
    if plan.strategy == "horovod" and folders:
        _check_horovod(plan, folders)
    if plan.local and plan.launcher == "mpirun" and shutil.which(plan.config.mpirun.executable) is None:
        raise PlanError(
            f"launcher mpirun needs {plan.config.mpirun.executable}, which is not on PATH: install or load an MPI, or "
            "use another launcher"
        )


def _packages(plan: LaunchPlan) -> list[Path]:
    """Where the ranks' Python looks for packages; none if that can't be seen from here."""
    if plan.runtime != "venv":
        return []
    if plan.python == sys.executable:
        return [Path(entry) for entry in sys.path if entry]
    return sorted(Path(plan.python).parent.parent.glob("lib/python3*/site-packages"))


def _what(plan: LaunchPlan, name: str) -> str:
    return f"strategy {plan.strategy}" if _PACKAGES.get(plan.strategy) == name else f"launcher {plan.launcher}"


def _remedy(name: str) -> str:
    if name == "horovod":
        return "phalanx env create PATH --with horovod builds it (docs/engines.md)"
    return f"pip install 'phalanx[{name}]'"


def _check_horovod(plan: LaunchPlan, folders: list[Path]) -> None:
    found = next(folder / "horovod" for folder in folders if (folder / "horovod").is_dir())
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
