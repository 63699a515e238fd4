"""From settings and facts to a plan: a pure function, so that the same question has the same answer anywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath

from ..config import JobConfig, hidden
from ..config.exclusions import without_shares
from ..errors import PlanError
from ..rank.topology import LOOPBACK
from ..registry import LAUNCHERS, load
from ..rundir import check_name
from ..shell import MARK, Sh, Word, word
from . import cells, texts
from .conda import is_folder
from .facts import Facts
from .plan import RUN_DIR_UNKNOWN, Allocation, LaunchPlan
from .program import Program
from .resources import Resources


def make_plan(
    config: JobConfig,
    facts: Facts,
    program: Program,
    *,
    for_slurm: bool = False,
    allocation: Allocation | None = None,
) -> LaunchPlan:
    """Decide everything that can be known before a launch, here, in a job to come or in an `allocation`.

    Raises PlanError when what is asked for can't be started: a cell that doesn't exist, more ranks than
    GPUs, a device or backend that isn't there.
    """
    config = _with_variables(config, program)
    texts.check(config, program)
    config, kept = without_shares(config)
    no_script = program.script is None and not program.late_script
    if config.dry_run and (no_script or config.exec_command or config.exec_file):
        raise PlanError(
            "dry_run shortens the loops of a Python script that calls phalanx.init(), and what is to run here is a "
            "command: give the script itself, or leave --dry-run out"
        )
    runtime = _runtime(config)
    local = _is_local(config) and not for_slurm and allocation is None
    resources = Resources(config, facts, local)
    if for_slurm:
        resources.check_requests()
    if program.refusal and resources.world_size > 1 and not (config.exec_command or config.exec_file):
        raise PlanError(program.refusal)
    chooser = _Chooser(config, facts, resources)
    cells.check(
        cells.cell(chooser.launcher, chooser.strategy, runtime, config.nodes), config.nodes, resources.world_size
    )
    chooser.check_placement()
    if config.nodes > 1 and config.master_addr and LOOPBACK.fullmatch(config.master_addr):
        raise PlanError(
            f"master_addr={config.master_addr!r} on nodes={config.nodes}: other nodes can't reach a loopback address; "
            "unset it, or give the first node's name"
        )
    device = chooser.device()
    backend = chooser.backend(device)
    resources.check_gpus(device)
    per_rank = resources.cpus_per_rank
    threads = _threads(config, facts, per_rank)
    workers = max(1, per_rank - 1) if per_rank is not None and config.num_workers == "auto" else None
    if isinstance(config.num_workers, int):
        workers = config.num_workers
    plan = LaunchPlan(
        name=run_name(config, program),
        config=config,
        script=program.script,
        args=program.args,
        late_script=program.late_script,
        strategy=chooser.strategy,
        launcher=chooser.launcher,
        nodes=config.nodes,
        nproc_per_node=resources.ranks,
        ntasks=resources.uneven,
        local=local,
        host=facts.hostname if local else None,
        cwd=facts.cwd,
        device=device,
        backend=backend,
        gpus_per_node=resources.asked_gpus,
        cpus_per_node=resources.cpus,
        cpus_per_rank=per_rank,
        omp_num_threads=threads,
        num_workers=workers,
        python=_python(config, facts, runtime, program),
        host_python=_host_python(config, facts) if runtime == "venv" else facts.python,
        runtime=runtime,
        mpi_flavor=_flavor(config, facts),
        versions=_versions(config, facts, runtime, program),
        environment=_environment(config, device, resources, threads, workers),
        allocation=allocation,
        notes=(*kept, *resources.notes, *chooser.notes, *_interpreter(config, runtime, program)),
    )
    starter = load("launcher", LAUNCHERS, chooser.launcher)()
    plan = replace(plan, environment={**starter.environment(plan), **plan.environment})
    command, before = tuple(starter.command(plan)), tuple(starter.before(plan))
    return replace(plan, command=command, before=before, notes=(*plan.notes, *starter.notes(plan)))


def _with_variables(config: JobConfig, program: Program) -> JobConfig:
    """The settings with the variables that stand in front of the command."""
    if not program.environment:
        return config
    said = {
        name: f"{MARK}{value.text}" if isinstance(value, Sh) else value for name, value in program.environment.items()
    }
    return config.model_copy(update={"env": {**config.env, **said}})


def run_name(config: JobConfig, program: Program) -> str:
    """The folder, under the run root, of these runs: their name, else the job's, else the script's.

    Raises PlanError for one that is no folder's name.
    """
    name = config.name or re.sub(r"[/\\]", "_", config.job_name or "") or program.name
    check_name(name)
    return name


def _is_local(config: JobConfig) -> bool:
    if config.launcher == "auto":
        return config.nodes == 1
    return config.nodes == 1 and load("launcher", LAUNCHERS, config.launcher).needs is None


def _runtime(config: JobConfig) -> str:
    """Where ranks run. Raises PlanError for a container without an image."""
    if config.runtime in ("venv", "none"):
        return "venv"
    if config.runtime == "auto":
        return "apptainer" if config.container.image else "venv"
    if not config.container.image:
        raise PlanError(
            f"runtime {config.runtime} needs an image: set container.image to a .sif file (phalanx container pull "
            "makes one), or runtime=venv"
        )
    return config.runtime


def _python(config: JobConfig, facts: Facts, runtime: str, program: Program) -> str:
    """The ranks' interpreter; a relative one is of the folder in which the command was given. `python` in
    `training_cmd` is that of the job's PATH, after modules and the user's lines."""
    if config.python:
        return config.python
    if runtime != "venv":
        return program.python if program.python and "/" in program.python else "python3"
    environment = _environment_folder(config, facts)
    if environment:
        return str(PurePath(environment, "bin", "python"))
    return program.python or ("python" if config.conda else facts.python)


def _host_python(config: JobConfig, facts: Facts) -> str:
    """One that has Phalanx, for what the batch shell itself does."""
    environment = _environment_folder(config, facts)
    return config.python or (str(PurePath(environment, "bin", "python")) if environment else facts.python)


def _environment_folder(config: JobConfig, facts: Facts) -> str | None:
    """The folder of the virtual or conda environment; None without one, or where only its name is known."""
    if config.conda and config.venv:
        raise PlanError(f"venv={config.venv!r} and conda={config.conda!r} are two environments: give one of them")
    folder = config.venv or (config.conda if is_folder(config.conda) else None)
    return str(PurePath(facts.cwd, folder)) if folder else None


def _versions(config: JobConfig, facts: Facts, runtime: str, program: Program) -> Mapping[str, str]:
    """Those of this Python's packages, where the ranks use it."""
    others = config.venv or config.conda or config.python or program.python or runtime != "venv"
    return {} if others else facts.versions


def _interpreter(config: JobConfig, runtime: str, program: Program) -> list[str]:
    """Which `python` a plan means that has no path."""
    if config.python or config.venv or runtime != "venv":
        return []
    if config.conda:
        return [] if is_folder(config.conda) else [f"python: that of the conda environment {config.conda}"]
    if program.python and "/" not in program.python:
        return [f"python: {program.python} on the PATH of the ranks, after modules and the lines before"]
    return []


def _flavor(config: JobConfig, facts: Facts) -> str:
    return facts.mpi_flavor if config.mpirun.flavor == "auto" else config.mpirun.flavor


class _Chooser:
    """Strategy, launcher, device and backend, in the order in which they depend on each other; `notes` says why."""

    def __init__(self, config: JobConfig, facts: Facts, resources: Resources) -> None:
        self.config = config
        self.facts = facts
        self.resources = resources
        self.notes: list[str] = []
        self.strategy = self._strategy()
        self.launcher = self._launcher()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def _strategy(self) -> str:
        if self.config.strategy != "auto":
            return self.config.strategy
        if self.config.launcher == "horovodrun":
            self.note("strategy horovod: launcher horovodrun starts no other")
            return "horovod"
        several = self.resources.world_size > 1
        self.note("strategy ddp: more than one process" if several else "strategy single: one process")
        return "ddp" if several else "single"

    def _launcher(self) -> str:
        if self.config.launcher != "auto":
            return self.config.launcher
        if self.resources.uneven:
            self.note(f"launcher srun: {self.resources.uneven} ranks don't divide over {self.config.nodes} nodes")
            return "srun"
        return self._default_launcher()

    def _default_launcher(self) -> str:
        launcher = cells.default_launcher(self.strategy, self.config.nodes, self.resources.world_size)
        several = "more than one process" if self.resources.world_size > 1 else "one process"
        where = "on several nodes" if self.config.nodes > 1 else "on one machine"
        self.note(f"launcher {launcher}: {f'Horovod {where}' if self.strategy == 'horovod' else several}")
        return launcher

    def check_placement(self) -> None:
        """Only Slurm and MPI place unequal numbers of ranks."""
        if self.resources.uneven and self.launcher not in ("srun", "mpirun"):
            raise PlanError(
                f"ntasks={self.resources.uneven} on {self.config.nodes} nodes is not the same number on each, and "
                f"{self.launcher} starts equally many on all: use --launcher srun, or a multiple of {self.config.nodes}"
            )

    def device(self) -> str | None:
        """The device of the ranks; None when only the nodes know."""
        asked, local = self.config.device, self.resources.local
        if asked == "mps" and self.resources.world_size > 1:
            raise PlanError(
                f"device mps holds one process, and {self.resources.world_size} were asked for: use --device cpu"
            )
        if asked == "mps" and local and not self.facts.has_mps:
            raise PlanError(f"device mps: this is {self.facts.system} on {self.facts.machine}; use --device cpu")
        if asked == "cuda" and self.resources.gpus == 0:
            raise PlanError(f"device cuda: {self.resources.no_gpus}; use --device cpu")
        return asked if asked != "auto" else self._best_device()

    def _best_device(self) -> str | None:
        gpus, local = self.resources.gpus, self.resources.local
        if gpus is None:
            self.note("device: cuda where a node has GPUs, else cpu; set gpus_per_node to plan it")
            return None
        if gpus > 0:
            self.note(f"device cuda: {gpus} GPUs per node")
            return "cuda"
        alone = self.resources.world_size == 1 and self.config.gpus_per_node != 0
        mps = local and self.facts.has_mps and alone
        self.note("device mps: one process on a Mac" if mps else f"device cpu: {self.resources.no_gpus}")
        return "mps" if mps else "cpu"

    def backend(self, device: str | None) -> str | None:
        """torch.distributed's backend; None when the device isn't known yet."""
        asked = self.config.backend
        if asked is not None and asked.lower() == "nccl" and device in ("cpu", "mps"):
            reason = self.resources.no_gpus if self.config.device == "auto" else f"device is {device}"
            raise PlanError(f"backend nccl moves data between GPUs, and {reason}: use --backend gloo")
        if asked is not None or device is None:
            return asked
        return "nccl" if device == "cuda" else "gloo"


def _threads(config: JobConfig, facts: Facts, per_rank: int | None) -> str | None:
    """OMP_NUM_THREADS of a rank: the user's own if set, else its share of the CPUs."""
    own = config.env.get("OMP_NUM_THREADS") or facts.omp_num_threads
    if own is not None:
        return str(own)
    return str(per_rank) if per_rank is not None else None


def _environment(
    config: JobConfig, device: str | None, resources: Resources, threads: str | None, workers: int | None
) -> dict[str, Word]:
    """What ranks get on top of the caller's environment."""
    # Without being told, an Accelerate script on the CPU takes each rank for a run of its own.
    accelerate = {"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}
    environment: dict[str, Word] = {"PYTHONUNBUFFERED": "1", **accelerate, **_network(config)}
    environment |= {name: word(text) for name, text in config.env.items()}
    environment |= hidden.params(config)
    if threads is not None and "OMP_NUM_THREADS" not in config.env:
        environment["OMP_NUM_THREADS"] = threads
    if resources.cpus_per_rank is not None:
        environment["PHALANX_CPUS_PER_RANK"] = str(resources.cpus_per_rank)
    if config.num_workers == "auto" and workers is not None:
        environment["PHALANX_NUM_WORKERS_AUTO"] = str(workers)
    environment["PHALANX_EXPECTED_WORLD_SIZE"] = str(resources.world_size)
    environment["PHALANX_RUN_DIR"] = RUN_DIR_UNKNOWN
    return environment


def _network(config: JobConfig) -> Mapping[str, str]:
    """The site's network, for those who meet over it: NCCL, gloo, and the rendezvous of the ranks."""
    names: dict[str, str] = {}
    if config.interface:
        names |= dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "PHALANX_INTERFACE"), config.interface)
    if config.host_suffix:
        names["PHALANX_HOST_SUFFIX"] = config.host_suffix
    return names
