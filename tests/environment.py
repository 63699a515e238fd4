"""The environment of the tests: the machine's, less what a cluster, a launch or a user sets.

What a machine needs stays, known or not: how its libraries are found, and how its GPUs may be used. What says who a
process is, how many threads it has, and how it talks to its user goes.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_FAMILIES = (
    "PHALANX_ USE_CONTAINER$ APPTAINER SINGULARITY",
    "SLURM SBATCH_ SALLOC_ SRUN_ SQUEUE_ SINFO_ SACCT_ SCANCEL_ PBS_ LSB_ FLUX_",
    "PMI OMPI_ ORTE_ PRTE_ MPI_ MPIR_ MPIEXEC_ MV2_ HYDRA_ HYDI_ PALS_",
    "RANK$ WORLD_SIZE$ (LOCAL|GROUP|ROLE|NODE|CROSS)_(RANK|SIZE|WORLD_SIZE|NAME)$ NNODES$ NPROC_PER_NODE$ MASTER_",
    "TORCHELASTIC_ PET_ HOROVOD_ RAY_ DS_ DEEPSPEED_ ACCELERATE_ FSDP_ GLOO_",
    "OMP_ GOMP_ KMP_ (MKL|OPENBLAS|NUMEXPR|BLIS|VECLIB)_NUM_THREADS$",
    "NO_COLOR$ FORCE_COLOR$ CLICOLOR PY_COLORS$ PYTHON_COLORS$ TTY_ COLUMNS$ LINES$ LANGUAGE$ LC_ TZ$",
    "PYTHON(IOENCODING|UTF8|WARNINGS|UNBUFFERED|OPTIMIZE|DEVMODE|SAFEPATH|STARTUP|COERCECLOCALE)$",
    "LOADEDMODULES$ _LMFILES_$ LMOD_ MODULE CONDA_ VIRTUAL_ENV",
    "TMPDIR$ TMP$ TEMP$ PIP_(USER|TARGET|PREFIX|ROOT|REQUIRE_VIRTUALENV)$ MPLBACKEND$",
    "GIT_(DIR|WORK_TREE|INDEX_FILE|PREFIX|CONFIG|AUTHOR|COMMITTER)",
)
_DROPPED = re.compile("|".join(" ".join(_FAMILIES).split()))
_PROXY = re.compile(r"\w+_proxy", re.IGNORECASE)
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
OTHER_GPUS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


def known(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """`environ` as tests take it; in `folder` are the user's settings, of which there are none, and a home if it is
    missing."""
    kept = {name: text for name, text in environ.items() if not (_DROPPED.match(name) or _PROXY.fullmatch(name))}
    home = environ.get("HOME") or _account_home()
    if not os.access(home, os.W_OK):
        home = str(folder / "home")
        os.makedirs(home, exist_ok=True)
    return kept | {"HOME": home, "XDG_CONFIG_HOME": str(folder / "config"), "LANG": "C.UTF-8", "TERM": "xterm"}


def _account_home() -> str:
    """An account may be unknown here, as in a container."""
    with suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_dir
    return ""
