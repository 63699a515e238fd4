"""What `phalanx run` and `phalanx plan` share: their options, and the way from words to a plan."""

from __future__ import annotations

import os

from ..config import Loaded, load_config
from ..config.saved import CONFIG_FILE
from ..facts import gather
from ..plan import LaunchPlan, make_plan, run_name
from ..rundir import find_run_dir
from .options import Scanned, require_script

OPTIONS = """\
options (before SCRIPT; what follows it is the script's own, untouched):
  -c, --config FILE      settings file (YAML); may be repeated, later ones win
      --nproc N          ranks per node: a number, auto, gpu or cpu
  -j NODESxPROCS         nodes and ranks per node, such as 2x4
  -s, --strategy NAME    single, ddp or fsdp; unset: ddp if there is more than one process
      --launcher NAME    auto, python, torchrun, srun, mpirun, horovodrun, deepspeed, ray
      --device NAME      auto, cpu, cuda or mps
      --backend NAME     torch.distributed backend; unset: nccl on cuda, gloo on cpu
      --resume RUN       go on with a run: its path or id, or 'latest'
      --KEY VALUE        any other setting; also --KEY=VALUE, --section.key VALUE, key=value,
                         and --flag or --no-flag for those that are true or false
      --                 the next word is SCRIPT, whatever it looks like
  -h, --help             show this help

`phalanx config --explain` lists every setting with its value and where it comes from."""


def plan_of(scanned: Scanned, command: str) -> tuple[LaunchPlan, Loaded]:
    """Settings and facts of this machine → plan. A resumed run keeps its settings where none are given anew."""
    script = require_script(scanned, command)
    loaded = load_config(scanned.files, scanned.overrides, os.environ)
    config = loaded.config
    if config.resume is not None:
        before = find_run_dir(config.run_root, run_name(config, script), config.resume) / CONFIG_FILE
        if before.exists():
            loaded = load_config((before, *scanned.files), scanned.overrides, os.environ)
    return make_plan(loaded.config, gather(os.environ), script, scanned.args), loaded
