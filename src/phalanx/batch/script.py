"""The batch script of a plan. What it prints is what is submitted, saved and previewed, byte for byte."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import PurePath

from .. import __version__, secret
from ..launchers.base import node_address
from ..planning import conda
from ..planning.plan import LaunchPlan
from ..rundir import DRY, DRY_CHECKPOINTS
from ..shell import Sh, exports, layout, quote, render, required
from .directives import directives
from .environment import modules, proxies, tmpdir

# A step takes one CPU a task unless it is told: `srun` of one's own is to have those of the job.
_STEP_CPUS = (
    'if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then '
    'export SRUN_CPUS_PER_TASK="${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}"; fi'
)
# `#!/bin/bash -e` would leave the script at a failed launch.
_STRICT = re.compile(r" -\w*[eu]| (errexit|nounset)\b")
_END_OF_CONFIG = "END_OF_CONFIG"
_EXIT = '"$PHALANX_RUN_DIR/jobs/$SLURM_JOB_ID.exit"'
_KEEP_EXIT = f'echo "$status" >{_EXIT}'


@dataclass(frozen=True)
class Inserts:
    """Text of the user's own files that stands in the script: `pre_exec_file` and `exec_file`."""

    before: str = ""
    launch: str = ""


def render_script(plan: LaunchPlan, settings: str, inserts: Inserts | None = None) -> str:
    """The whole script; `settings` is the YAML that its ranks find as config.yaml.

    Raises PlanError for values that cannot stand in a directive.
    """
    inserts = inserts or Inserts()
    strict = "+eu " if _STRICT.search(plan.config.shebang) else ""
    parts = [
        _head(plan),
        [f"set {strict}-o pipefail", f"unset {' '.join(_foreign(plan))}"],
        _run_directory(plan, settings),
        *modules(plan.config.modules, _before(plan, inserts), f"echo 2 >{_EXIT}"),
        required(plan.secrets, f"echo 2 >{_EXIT}"),
        proxies(plan.config.proxy),
        _environment(plan),
        _venv(plan),
        tmpdir(plan.config.tmpdir),
        _claim(plan),
        _rendezvous(plan),
        _launch(plan, inserts.launch),
        _dry_run(plan),
        _after(plan.config.after),
        [_KEEP_EXIT, '[ -z "$claim" ] || : >"$claim"', 'exit "$status"'],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _head(plan: LaunchPlan) -> list[str]:
    ranks = f"{plan.nodes} x {plan.nproc_per_node}" if plan.ntasks is None else f"{plan.ntasks} on {plan.nodes} nodes"
    about = f"# {plan.launcher}, {plan.strategy}, ranks {ranks} (phalanx {__version__})"
    return ["#!" + plan.config.shebang.removeprefix("#!").strip(), *directives(plan), about]


def _run_directory(plan: LaunchPlan, settings: str) -> list[str]:
    """`phalanx submit` gives the run directory as the argument. Under plain `sbatch FILE` the job makes one of its
    own; a requeued job finds it again. The tasks of an array have one each."""
    root, mode = PurePath(plan.cwd, plan.config.run_root), plan.config.run_mode
    mask = ~plan.config.run_permissions & 0o777
    lines = [
        f"run_dir=${{1:-{shlex.quote(str(root / plan.name))}/job-${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}}}",
        # A node that doesn't see it would make one that nobody else sees, and train there.
        '[ -z "${1-}" ] || [ -e "$1/config.yaml" ] || {',
        '  echo "phalanx: $(hostname) has no run directory $1: set run_root to a folder that all nodes share" >&2',
        "  exit 2",
        "}",
        'export PHALANX_RUN_DIR="$run_dir${SLURM_ARRAY_TASK_ID:+/array-$SLURM_ARRAY_TASK_ID}"',
        f'mkdir -p "${{PHALANX_RUN_DIR%/*}}" && {{ mkdir -m {mode} "$PHALANX_RUN_DIR" 2>/dev/null || true; }}',
        'mkdir -p "$PHALANX_RUN_DIR/jobs" || exit',
        *_umask(plan),
        'date +%s >>"$PHALANX_RUN_DIR/jobs/$SLURM_JOB_ID.start"',
        "# What stands before this line in an output file that jobs or restarts share is not this start's",
        '[ ! -s /dev/stderr ] || echo "=== phalanx: job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0} ===" >&2',
        f'[ -e "$PHALANX_RUN_DIR/config.yaml" ] || (umask {mask:03o}; cat >"$PHALANX_RUN_DIR/config.yaml") '
        f"<<'{_END_OF_CONFIG}'",
        *settings.splitlines(),
        _END_OF_CONFIG,
    ]
    if plan.config.dry_run:
        lines.append(f'touch "$PHALANX_RUN_DIR/{DRY}"')
    if plan.config.snapshot:
        lines.append('if [ -d "$run_dir/workdir" ]; then cd "$run_dir/workdir" || exit; fi  # the snapshot')
    return lines


def _umask(plan: LaunchPlan) -> list[str]:
    """What the run directory gives to others, the submitter's umask is not to take away."""
    mode = plan.config.run_permissions & 0o077
    return [f'umask "$(printf %04o $(($(umask) & ~0{mode:o})))"  # run_mode'] if mode else []


def _before(plan: LaunchPlan, inserts: Inserts) -> list[str]:
    """The user's own lines. Their `set -eu` and `trap … ERR` are for themselves: the script looks
    into a launch that fails, and may not be left there."""
    texts = [text for text in (plan.config.before, inserts.before) if text and text.strip()]
    # The empty lines end what a backslash would join with the line after it.
    lines = [line for text in texts for line in (text.rstrip("\n"), "")]
    return ["# Before", *lines, "set +eu -o pipefail; trap - ERR"] if lines else []


def _dry_run(plan: LaunchPlan) -> list[str]:
    """What a rank that was killed could not take away."""
    return [f'rm -rf "$PHALANX_RUN_DIR/{DRY_CHECKPOINTS}"'] if plan.config.dry_run else []


def _after(text: str | None) -> list[str]:
    """In a shell of its own, so that not even an `exit` changes how the job ends."""
    return ["# After", "(", text.rstrip(), ")"] if text and text.strip() else []


def _environment(plan: LaunchPlan) -> list[str]:
    """`phalanx submit` hands secrets over in the environment; under plain `sbatch` they are the submitter's own."""
    own = {name: value for name, value in plan.environment.items() if name != "PHALANX_RUN_DIR"}
    own["PHALANX_LAUNCH_ID"] = Sh("$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$$")  # no other launch's
    if plan.omp_num_threads is None:  # the share of what Slurm gives, which is known here only
        share = f"${{SLURM_CPUS_ON_NODE:-1}} / {plan.nproc_per_node}"
        own["OMP_NUM_THREADS"] = Sh(f"${{OMP_NUM_THREADS:-$(({share} > 1 ? {share} : 1))}}")
    return ["# Environment", *exports(secret.without(own))]


def _foreign(plan: LaunchPlan) -> list[str]:
    """Words of a launch or job around a plain `sbatch`, which come along and contradict this job's own."""
    memory = {"mem": "NODE", "mem_per_cpu": "CPU", "mem_per_gpu": "GPU"}
    asked = [suffix for setting, suffix in memory.items() if getattr(plan.config, setting)]
    others = [f"SLURM_MEM_PER_{suffix}" for suffix in memory.values() if asked and suffix not in asked]
    ranks = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"]
    # An export option of the submission, or a site's default, is about the job: what its script sets is for all tasks.
    ranks += ["HOROVOD_RANK", "SLURM_EXPORT_ENV"]
    return [*ranks, "SLURM_CPU_BIND", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_LIST", "SRUN_CPUS_PER_TASK", *others]


def _venv(plan: LaunchPlan) -> list[str]:
    """The environment of the ranks; a bare `python` is looked at, since only this shell knows which one it is."""
    if plan.runtime != "venv":
        return []
    entered = conda.enter(plan.config.conda, plan.cwd) if plan.config.conda else _activated(plan)
    if "/" in plan.python or plan.config.exec_command or plan.config.exec_file:
        return [*_fail(), *entered] if plan.config.conda else entered
    python = shlex.quote(plan.python)
    look = render([plan.python, "-c", 'from importlib.util import find_spec as f; exit(not f("phalanx"))'])
    fault = f"the Python that training_cmd or conda means ($(command -v {python} || echo none)) can't import phalanx"
    remedy = "install it there, or set venv, conda or python"
    return [*_fail(), *entered, "# The ranks' Python", f'{look} 2>/dev/null || fail "{fault}: {remedy}"']


def _fail() -> list[str]:
    return [f'fail() {{ echo "error: $1" >&2; echo 2 >{_EXIT}; exit 2; }}']


def _activated(plan: LaunchPlan) -> list[str]:
    if not plan.config.venv:
        return []
    return ["# Virtual environment", f". {shlex.quote(str(PurePath(plan.cwd, plan.config.venv, 'bin/activate')))}"]


def _claim(plan: LaunchPlan) -> list[str]:
    """Whether this job may run here. Where Python can't be started (the user's own lines may not
    need it), it runs unclaimed."""
    ask = render([plan.host_python, "-m", "phalanx.claims", Sh('"$PHALANX_RUN_DIR"')])
    return [
        "# One attempt at a time in a run directory, and none after the one that ends a chain",
        f"claim=$({ask})",
        "case $claim in",
        f'  "end "*) status=${{claim#end }}; {_KEEP_EXIT}; exit "$status" ;;',
        "  *.released) ;;",
        "  *) claim= ;;  # it could not be asked",
        "esac",
    ]


def _rendezvous(plan: LaunchPlan) -> list[str]:
    """Where agents meet: this shell runs on the first node, so it can look for a free port there."""
    if not any(isinstance(word, str) and "PHALANX_RDZV" in word for word in map(quote, plan.command)):
        return []
    free_port = render([plan.host_python, "-m", "phalanx.ports", Sh('"$SLURM_JOB_ID"')])
    return [
        "# The agents' meeting point: this node, and a port of the job's own below the ephemeral ones",
        f"PHALANX_RDZV_HOST={node_address(plan.config)}",
        f'PHALANX_RDZV_PORT="${{MASTER_PORT:-$({free_port})}}"',
        "export PHALANX_RDZV_HOST PHALANX_RDZV_PORT",
    ]


def _launch(plan: LaunchPlan, text: str) -> list[str]:
    """The step and its exit code, which is the failed rank's where that is known: srun's may be that of the ranks
    which it ended. What comes after cannot change it."""
    own = plan.config.exec_command or text
    # Of the user's own lines the first that fails counts, not the last one's `echo`.
    line = f"(\n{_STEP_CPUS}\nset -e\n{own.rstrip()}\n)" if own else "\n".join([*plan.before, layout(plan.command)])
    report = render([plan.host_python, "-m", "phalanx.report_failure", Sh('"$PHALANX_RUN_DIR" "$status"')])
    split = ["# shellcheck disable=SC2046  # one word a variable"] if "$(compgen" in line else []
    return ["# Launch", *split, line, "status=$?", f'[ "$status" -eq 0 ] || {report} || status=$?']
