"""Settings of the user's that a job's script can't use, so that none is dropped without a word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...config import Loaded
from ...config.exclusions import no_gpus
from ...config.loader import DEFAULT
from ...planning.plan import LaunchPlan

_OF_SRUN = ("cpu_bind", "mpi", "srun_args")
_OF_MPIRUN = ("mpirun.executable", "mpirun.flavor", "mpirun.args")
_OF_TORCHRUN = ("torchrun.executable", "torchrun.start")
_FOR_ALL = ("site profile ", "user file ")  # what these say is for the jobs that can use it


def unused(loaded: Loaded, plan: LaunchPlan) -> list[str]:
    """A sentence for each, with its origin."""
    found = []
    for key, why in _without_use(plan):
        origin, value = loaded.origins.get(key, DEFAULT), _value(plan, key)
        if origin != DEFAULT and not origin.startswith(_FOR_ALL) and value not in (None, (), ""):
            found.append(f"{key}={_shown(value)} ({origin}) has no effect: {why}")
    return found


def _without_use(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    config = plan.config
    own = "exec_command" if config.exec_command else "exec_file" if config.exec_file else None
    if config.exec_command:
        yield "exec_file", "exec_command stands in its place"
    starters = {
        "srun": (_OF_SRUN, "srun" in plan.command),
        "mpirun": (_OF_MPIRUN, config.mpirun.executable in plan.command),
        "torchrun": (_OF_TORCHRUN, plan.launcher == "torchrun"),
    }
    for starter, (keys, used) in starters.items():
        reason = f"{own} stands in place of the launch" if own else f"launcher {plan.launcher} starts no {starter}"
        for key in keys if own or not used else ():
            yield key, reason
    if no_gpus(config):
        yield "gpu_type", "the job asks for no GPUs"
    elif config.gres is not None and "gpu" in config.gres:
        yield "gpu_type", "gres asks for the GPUs; name the type there (gpu:TYPE:N)"
    elif config.sbatch.gpus is not None:
        yield "gpu_type", "gpus asks for them; name the type there (TYPE:N)"


def _value(plan: LaunchPlan, key: str) -> Any:
    value: Any = plan.config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
