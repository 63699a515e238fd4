"""The command that runs a task inside an image: pure, from a plan."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePath

from ..plan import LaunchPlan
from ..shell import Sh, Word, layout

# What tells ranks who they are and how to reach each other; a clean environment, or the image's own, would hide it.
_PREFIXES = (
    *("SLURM_", "PMI", "OMPI_", "MPI_", "MV2_", "HYDRA_", "PALS_", "FLUX_", "PHALANX_", "TORCHELASTIC_", "MASTER_"),
    *("CUDA_", "NVIDIA_", "ROCR_", "HIP_", "NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "OMP_", "MKL_", "OPENBLAS_"),
    *("TRITON_", "TORCH", "MIOPEN_", "WANDB_", "MLFLOW_", "HF_", "HUGGING_FACE_", "ACCELERATE_", "DS_", "HOROVOD_"),
    "RAY_",
)
_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "TMPDIR", "PYTHONUNBUFFERED"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "TERM", "USER"),
)
# Host paths that mean nothing inside; the image has its own.
_HOST_ONLY = ("PATH", "LD_LIBRARY_PATH", "HOME", "PWD", "SHELL", "VIRTUAL_ENV", "PYTHONHOME")


def inside(plan: LaunchPlan, words: list[Word]) -> str:
    """Shell text of one task that runs `words` in the image; shell text in them is evaluated outside, in the task.

    Variables travel as APPTAINERENV_*, which win over the image's own; `--no-eval` keeps their text as it is. Always
    `exec`: `run` without a runscript ends well and runs nothing.
    """
    runtime = plan.runtime.upper()
    own = [name for name in (*_NAMES, *plan.environment) if name not in _HOST_ONLY and not name.startswith(_PREFIXES)]
    names = "|".join(dict.fromkeys(own))
    pattern = f"^(({names})$|{'|'.join(_PREFIXES)})"
    lines = [
        'if [ -n "${TMPDIR:-}" ]; then mkdir -p "$TMPDIR"; fi',
        f"for name in $(compgen -e | grep -E '{pattern}'); do export \"{runtime}ENV_$name=${{!name}}\"; done",
        layout([Sh("exec"), *_exec(plan), *_within(plan, words)]),
    ]
    return "\n".join(lines)


def _exec(plan: LaunchPlan) -> list[Word]:
    """`apptainer exec` with its options and the image."""
    config = plan.config.container
    options: list[Word] = ["--no-eval", *_mounts(plan)]
    options += ["--cleanenv"] if config.clean_env else []
    if config.home is not None:
        options.append("--no-home" if config.home == "none" else f"--home={config.home}")
    options += _gpu(plan)
    image = str(PurePath(plan.cwd, config.image or ""))
    return [config.executable or plan.runtime, "exec", *options, *config.args, image]


def _mounts(plan: LaunchPlan) -> list[Word]:
    """The project's folder, the script's, the run directory, temporary files, and what the user names."""
    folders = [plan.cwd]
    if plan.script is not None:
        script = PurePath(plan.cwd, plan.script).parent
        folders += [] if script.is_relative_to(plan.cwd) else [str(script)]
    own: list[Word] = [_mount(folder, folder) for folder in folders]
    own += [Sh(_mount_of(f"${name}")) for name in ("PHALANX_RUN_DIR", *(["TMPDIR"] if plan.config.tmpdir else []))]
    return [*own, *(_mount(*parts(bind)) for bind in plan.config.container.binds)]


def parts(bind: str) -> tuple[str, str, str]:
    """Source, destination and options of `source[:destination[:options]]`, where `\\:` and `\\,` are letters of a path,
    as for `--bind`."""
    found = [re.sub(r"\\([,:])", r"\1", part) for part in re.split(r"(?<!\\):", bind)]
    source = found[0]
    return source, found[1] if len(found) > 1 and found[1] else source, found[2] if len(found) > 2 else ""


def _mount(source: str, destination: str, options: str = "") -> str:
    """`--mount` takes paths with commas and colons, which `--bind` splits at. Its value is a line of CSV."""
    fields = ["type=bind", f"source={source}", f"destination={destination}", *(["ro"] if options == "ro" else [])]
    return "--mount=" + ",".join(_csv(field) for field in fields)


def _csv(field: str) -> str:
    return '"' + field.replace('"', '""') + '"' if re.search('[",]', field) else field


def _mount_of(variable: str) -> str:
    """The same in shell text, for a folder that is known in the task only."""
    return f'--mount="type=bind,\\"source={variable}\\",\\"destination={variable}\\""'


def _gpu(plan: LaunchPlan) -> list[Word]:
    kind = plan.config.container.gpu
    if kind in ("nv", "rocm"):
        return [f"--{kind}"]
    if kind == "none" or plan.device == "cpu":
        return []
    # Whose GPUs there are only the node knows.
    return [Sh("$([ -e /proc/driver/nvidia ] && echo --nv || { [ -e /dev/kfd ] && echo --rocm; })")]


def _within(plan: LaunchPlan, words: list[Word]) -> list[Word]:
    pre = plan.config.container.pre
    return ["sh", "-c", f'{pre.rstrip()}\nexec "$@"', "sh", *words] if pre else words


def shown(plan: LaunchPlan) -> str:
    """The part outside, for the reader of a plan."""
    return " ".join(word.text if isinstance(word, Sh) else shlex.quote(word) for word in _exec(plan))
