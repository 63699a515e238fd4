"""What is known of this machine before anything is planned; nothing here imports torch."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from ..rank.cpus import usable_cpus
from ..rank.devices import visible_devices

PACKAGES = ("torch", "deepspeed", "horovod", "ray")


@dataclass(frozen=True)
class Facts:
    """One machine: CPUs and GPUs that this process may use, its python and the installed versions.

    `system` is `platform.system()`'s and `machine` is `platform.machine()`'s text. `omp_num_threads` is
    the value that the caller's environment already has, if any. `cwd` is the folder that relative paths mean.
    """

    hostname: str
    cpus: int
    gpus: int
    python: str
    system: str
    machine: str
    versions: Mapping[str, str] = field(default_factory=dict)
    omp_num_threads: str | None = None
    cwd: str = "."
    mpi_flavor: str = "openmpi"

    @property
    def has_mps(self) -> bool:
        """Apple's own chips have Metal; whether torch was built for it only torch knows."""
        return self.system == "Darwin" and self.machine == "arm64"


def gather(environ: Mapping[str, str], mpirun: str | None = None) -> Facts:
    """Look at this machine, in milliseconds (seconds where only nvidia-smi knows the GPUs).

    `mpirun` is asked whose it is, if given.
    """
    return Facts(
        hostname=platform.node(),
        cpus=usable_cpus(environ=environ),
        gpus=usable_gpus(environ),
        python=sys.executable,
        system=platform.system(),
        machine=platform.machine(),
        versions=installed(PACKAGES),
        omp_num_threads=environ.get("OMP_NUM_THREADS") or None,
        cwd=str(Path.cwd()),
        mpi_flavor=_mpi_flavor(mpirun) if mpirun else "openmpi",
    )


def _mpi_flavor(mpirun: str) -> str:
    """`mpich` for MPICH and those made from it (Intel, Cray, MVAPICH); where there is none yet, Open MPI's form."""
    command = shutil.which(mpirun)
    if command is None:
        return "openmpi"
    import subprocess

    try:
        answer = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "openmpi"
    mpich = any(word in answer.stdout for word in ("HYDRA", "MPICH", "MVAPICH", "Intel(R) MPI"))
    return "mpich" if mpich else "openmpi"


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """Versions of those of `packages` that this python can import."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def usable_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """GPUs that ranks started from here would see: 0 without hardware, whatever the variables say."""
    restriction = visible_devices(environ)
    if restriction is not None and not restriction:
        return 0
    present = _nvidia_gpus(root) or _amd_gpus(root)
    return len(restriction) if present and restriction is not None else present


def _nvidia_gpus(root: Path) -> int:
    folder = root / "proc/driver/nvidia/gpus"
    if folder.is_dir():
        return sum(1 for _ in folder.iterdir())
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    import subprocess  # start-up time that most machines need not spend

    try:
        listing = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def _amd_gpus(root: Path) -> int:
    """The kernel driver lists CPUs as nodes too; theirs have the GPU id 0."""
    if not (root / "dev/kfd").exists():
        return 0
    ids = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    return sum(path.read_text().strip() != "0" for path in ids)
