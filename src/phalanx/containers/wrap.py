"""The command that runs a task inside an image: pure, from a plan."""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from pathlib import Path, PurePath

from ..bound import LIBRARY, PACKAGES
from ..planning.plan import LaunchPlan
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
# Host paths that mean nothing inside, also where the settings change them; the image has its own.
_HOST_ONLY = ("PATH", "LD_LIBRARY_PATH", "HOME", "PWD", "SHELL")
# What leads a Python or a shell to files of the host's: inside only where `env` sets it.
_HOST_PYTHON = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONSTARTUP", "PYTHONEXECUTABLE", "PYTHONPLATLIBDIR"),
    *("PYTHONPYCACHEPREFIX", "VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_EXE"),
    *("CONDA_PYTHON_EXE", "CONDA_SHLVL", "CONDA_PROMPT_MODIFIER", "BASH_ENV"),
)
_PRE_FAILED = """\
trap 'code=$?; echo "phalanx: container.pre ended with exit code $code on $(uname -n), so nothing is started there: \
correct the lines (what they printed stands above), or add || true to one that may fail" >&2; \
[ "$code" -ne 0 ] || code=1; exit "$code"' EXIT"""

# Where the task is outside: with --contain and the like, a container starts in its home.
_SAME_FOLDER = 'cd -- "${PHALANX_CWD:-.}" 2>/dev/null || :; unset PHALANX_CWD'
# A script that the user's lines source without arguments would take the rank's words for its own.
_KEEP_WORDS = """\
phalanx_n=0
for phalanx_w do phalanx_n=$((phalanx_n + 1)); eval "phalanx_$phalanx_n=\\$phalanx_w"; done
set --"""
_WORDS_AGAIN = """\
set --; phalanx_w=0
while [ "$phalanx_w" -lt "$phalanx_n" ]; do
  phalanx_w=$((phalanx_w + 1)); eval "set -- \\"\\$@\\" \\"\\$phalanx_$phalanx_w\\""
done"""


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
        *([] if _has_own_folder(plan) else [f'export {runtime}ENV_PHALANX_CWD="$(pwd -P)"']),
        f"for name in $(compgen -e | grep -E '{pattern}'); do export \"{runtime}ENV_$name=${{!name}}\"; done",
    ]
    if "PYTHONNOUSERSITE" not in plan.environment:  # a home that is mounted has packages for the host's Python
        lines.append(f'export {runtime}ENV_PYTHONNOUSERSITE="${{{runtime}ENV_PYTHONNOUSERSITE-1}}"')
    lines += ["own=()", *(_if_there(folder, place) for folder, place in _own_folders(plan).items())]
    # Not unset before: what is evaluated here may need the host's Python.
    unset = textwrap.wrap(" ".join(f"--unset={name}" for name in _HOST_PYTHON), 110, break_on_hyphens=False)
    start = Sh(" \\\n  ".join(["exec env", *unset]))
    lines.append(layout([start, *_exec(plan), *_within(plan, words)]))
    return "\n".join(lines)


def _has_own_folder(plan: LaunchPlan) -> bool:
    """Whether the user says in which folder of the image to begin."""
    return any(word.partition("=")[0] in ("--pwd", "--cwd") for word in plan.config.container.args)


def packages(plan: LaunchPlan) -> Path:
    """The host's folder of what the API needs and the image lacks: by default beside the image."""
    config = plan.config.container
    if config.packages:
        return Path(on_host(plan, config.packages))
    image = Path(image_of(plan))
    return image.parent / f"{image.name}.phalanx"


def image_of(plan: LaunchPlan) -> str:
    return on_host(plan, plan.config.container.image or "")


def on_host(plan: LaunchPlan, path: str) -> str:
    """A path of the settings, whole: from the project's folder, and with `~` as shells have it
    (which Path.expanduser raises at, where no user has that name)."""
    return str(PurePath(plan.cwd, os.path.expanduser(path)))  # noqa: PTH111


def _own_folders(plan: LaunchPlan) -> dict[str, str]:
    """This package, alone, as the others of the folder that it is installed in would hide the
    image's; and what the image lacks for the API."""
    return {str(Path(__file__).resolve().parents[1]): f"{LIBRARY}/phalanx", str(packages(plan)): PACKAGES}


def _if_there(folder: str, place: str) -> str:
    """A bind of a missing folder is fatal, and what nodes have is known there only."""
    return f"if [ -d {shlex.quote(folder)} ]; then own+=({shlex.quote(_mount(folder, place, 'ro'))}); fi"


def _exec(plan: LaunchPlan) -> list[Word]:
    """`apptainer exec` with its options and the image."""
    config = plan.config.container
    options: list[Word] = ["--no-eval", *_mounts(plan), Sh('"${own[@]}"')]
    options += ["--cleanenv"] if config.clean_env else []
    if config.home is not None:
        source, colon, inside = config.home.partition(":")
        options.append("--no-home" if config.home == "none" else f"--home={on_host(plan, source)}{colon}{inside}")
    options += _gpu(plan)
    return [config.executable or plan.runtime, "exec", *options, *config.args, image_of(plan)]


def _mounts(plan: LaunchPlan) -> list[Word]:
    """The project's folder, the script's, the run directory, temporary files, and what the user names."""
    folders = [plan.cwd]
    if plan.script is not None:
        script = PurePath(plan.cwd, plan.script).parent
        folders += [] if script.is_relative_to(plan.cwd) else [str(script)]
    own: list[Word] = [_mount(folder, folder) for folder in folders]
    own.append(Sh(_mount_of("$PHALANX_RUN_DIR")))
    own += [Sh(f"${{TMPDIR:+{_mount_of('$TMPDIR')}}}")] if plan.config.tmpdir else []
    return [*own, *(_mount(*_whole(plan, bind)) for bind in plan.config.container.binds)]


def _whole(plan: LaunchPlan, bind: str) -> tuple[str, str, str]:
    """A bind's parts; a folder without a place inside has its own there."""
    source, destination, options = parts(bind)
    whole = on_host(plan, source)
    return whole, whole if destination == source else destination, options


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
    """`words` after the user's lines, with this package before what PYTHONPATH names there.

    The lines are bash's where the image has one, as those of a job script are; the first that
    fails is the last."""
    start = f'export PYTHONPATH="{LIBRARY}${{PYTHONPATH:+:$PYTHONPATH}}"\nexec "$@"'
    pre = plan.config.container.pre
    if not pre:
        return ["sh", "-c", f"{_SAME_FOLDER}\n{start}", "sh", *words]
    own = f"{pre.rstrip()}\n"  # an empty line ends what a backslash would join with the next
    text = "\n".join([_SAME_FOLDER, "set -e", _PRE_FAILED, _KEEP_WORDS, own, _WORDS_AGAIN, "trap - EXIT", start])
    return ["sh", "-c", 'exec "$(command -v bash || command -v sh)" -c "$@"', "sh", text, "bash", *words]


def shown(plan: LaunchPlan) -> str:
    """The part outside, for the reader of a plan."""
    return " ".join(word.text if isinstance(word, Sh) else shlex.quote(word) for word in _exec(plan))
