"""Horovod, built for the torch of this Python's environment and installed there; the wheel is kept for the next time.

    .venv/bin/python tools/engines.py

Whatever goes wrong is said, and isn't an error: Horovod is optional.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from phalanx.bootstrap import HOROVOD_NEEDS, HOROVOD_TOOLCHAIN, HOROVOD_VARIABLES

VERSION = "0.28.1"
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
MPI_PACKAGES = ("libopenmpi-dev", "openmpi-bin", "g++", "cmake", "make")


def main() -> int:
    try:
        if not works():
            install(cached() or build())
            if not works():
                raise RuntimeError("it was built, but can't be imported")
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"Horovod can't be had, so its tests will be skipped: {error}", file=sys.stderr)
    return 0


def works() -> bool:
    done = subprocess.run([sys.executable, "-c", "import horovod.torch"], capture_output=True, check=False)
    return done.returncode == 0


def folder() -> Path:
    """Wheels by what they were built for: a torch, a Python (by the wheel's own name) and MPI or none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    mpi = "mpi" if shutil.which("mpicxx") else "gloo"
    return cache / "phalanx" / f"horovod-{VERSION}-torch{metadata.version('torch')}-{mpi}"


def cached() -> Path | None:
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return next(folder().glob(f"horovod-*-{tag}-*.whl"), None)


def build() -> Path:
    """With gloo, and with MPI where its compiler is or can be installed; minutes on two cores."""
    if shutil.which("mpicxx") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "-qq", "update"], check=False)
        subprocess.run(
            ["apt-get", "-qq", "install", "-y", "--no-install-recommends", *MPI_PACKAGES],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    print("building Horovod (minutes, once a machine) ...", file=sys.stderr, flush=True)
    subprocess.run([*PIP, "install", "-c", str(CONSTRAINTS), *HOROVOD_NEEDS], check=True)
    into = folder()
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        toolchain = Path(work, "horovod.cmake")
        toolchain.write_text(HOROVOD_TOOLCHAIN, encoding="utf-8")
        done = subprocess.run(
            [
                *(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-binary", "horovod"),
                *("-c", str(CONSTRAINTS), "-w", work, f"horovod=={VERSION}"),
            ],
            env={**os.environ, **variables(), "CMAKE_TOOLCHAIN_FILE": str(toolchain)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError("its build failed:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-30:]))
        (wheel,) = Path(work).glob("horovod-*.whl")
        return Path(shutil.move(wheel, into / wheel.name))


def variables() -> dict[str, str]:
    mpi = "WITH" if shutil.which("mpicxx") else "WITHOUT"
    own = {"HOROVOD_WITH_GLOO": "1", f"HOROVOD_{mpi}_MPI": "1"}
    own |= {"LDFLAGS": "-s", "MAKEFLAGS": f"-j{os.cpu_count() or 2}"}
    bin_folder = str(Path(sys.executable).parent)  # cmake is among what was installed there
    return {**HOROVOD_VARIABLES, **own, "PATH": bin_folder + os.pathsep + os.environ["PATH"]}


def install(wheel: Path) -> None:
    subprocess.run([*PIP, "install", "-c", str(CONSTRAINTS), "--no-deps", "--force-reinstall", str(wheel)], check=True)
    subprocess.run([*PIP, "install", "-c", str(CONSTRAINTS), "cloudpickle", "psutil", "pyyaml", "cffi"], check=True)


if __name__ == "__main__":
    sys.exit(main())
