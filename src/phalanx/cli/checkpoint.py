"""`phalanx checkpoint`: the weights of a checkpoint as one file, and what checkpoints a run has."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from ..checkpoint import store
from ..checkpoint.best import Monitor
from ..errors import CheckpointError, UsageError
from ..registry import require
from ..rundir import find_run_dir
from .jobs import Wanted, read

HELP = """\
usage: phalanx checkpoint export RUN OUT.safetensors [options]   the weights of a checkpoint, as one file
       phalanx checkpoint export RUN OUT.pt                      the same for torch.load
       phalanx checkpoint list RUN [--json]                      the checkpoints of a run

RUN is a run directory or one of its checkpoints/<step>; with --name, a run's id or `latest`. Tensors are whole
and on the CPU, under the names of the script's own module, whatever strategy and number of ranks saved them.

      --step N           that checkpoint; without it, the newest whole one
      --best             the best one by the run's setting checkpoint.monitor
      --model I          of several prepared models, the one with this number (0)
      --force            write over OUT
      --run-root DIR     where run directories are (the setting run_root)
  -h, --help             show this help"""


def main(argv: Sequence[str]) -> int:
    """`argv` without the command's name; the result is the exit code."""
    wanted = read(argv, flags=("best", "force", "json"), valued=("step", "model"))
    if "help" in wanted.scanned.flags:
        print(HELP)
        return 0
    verb, *words = wanted.targets or ("",)
    if verb == "list" and len(words) == 1:
        return _list(_run_dir(wanted, words[0]), "json" in wanted.scanned.flags)
    if verb == "export" and len(words) == 2:
        return _export(wanted, words[0], Path(words[1]).expanduser().absolute())
    raise UsageError("expected phalanx checkpoint export RUN OUT, or list RUN; see phalanx checkpoint --help")


def _run_dir(wanted: Wanted, word: str) -> Path:
    path = Path(word).expanduser().absolute()
    return path if path.is_dir() else find_run_dir(wanted.root, wanted.config.name or "", word)


def _export(wanted: Wanted, word: str, out: Path) -> int:
    values, flags = wanted.scanned.values, wanted.scanned.flags
    if out.suffix not in (".safetensors", ".pt", ".pth", ".bin"):
        raise UsageError(f"export to {out.name!r}: expected a name that ends in .safetensors or .pt")
    if out.exists() and "force" not in flags:
        raise UsageError(f"{out} is there already: choose another name, or --force to write over it")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent} is no folder: make it, or choose another for {out.name}")
    checkpoint = _chosen(_run_dir(wanted, word), values, "best" in flags)
    model = _number(values, "model") or 0
    require("torch", "torch")
    if out.suffix == ".safetensors":
        require("safetensors", "export")
    count = import_module("phalanx.checkpoint.export").export(checkpoint, out, model)
    print(f"{out}: {count} tensors, {out.stat().st_size / 2**20:.1f} MiB, from {checkpoint}")
    return 0


def _number(values: Mapping[str, str], name: str) -> int | None:
    text = values.get(name)
    if text is not None and not text.isdecimal():
        raise UsageError(f"--{name} {text!r}: expected a whole number from 0")
    return None if text is None else int(text)


def _chosen(path: Path, values: Mapping[str, str], best: bool) -> Path:
    """The checkpoint that is meant, which is whole."""
    step = _number(values, "step")
    if best and step is not None:
        raise UsageError("--best and --step exclude each other: give one of them")
    if _is_checkpoint(path):
        if best or step is not None:
            raise UsageError(
                f"--{'best' if best else 'step'} chooses from a run's checkpoints, and {path} is one of them"
            )
        found = [path]
    elif step is not None:
        found = [path / "checkpoints" / str(step)]
        if not found[0].is_dir():
            there = ", ".join(one.name for one in reversed(store.steps(path / "checkpoints"))) or "none"
            raise UsageError(f"--step {step}: {path} has no such checkpoint; there are {there}")
    else:
        found = _best(path) if best else store.steps(path / "checkpoints")
    defects = {one: store.defect(one) for one in found}
    whole = next((one for one, defect in defects.items() if defect is None), None)
    if whole is None:
        first = next(iter(defects.items()), None)
        why = f"{first[0]} is broken: {first[1]}" if first else f"expected {path}/checkpoints/<step>"
        raise CheckpointError(f"no whole checkpoint in {path}: {why}")
    return whole


def _is_checkpoint(path: Path) -> bool:
    return (path / store.MARKER).exists() or (path / ".metadata").exists()


def _best(run_dir: Path) -> list[Path]:
    root = run_dir / "checkpoints"
    for said in map(store.marker_of, store.steps(root)):
        for name in _values(said):  # the newest one's, as the run may have got another
            found = Monitor(root, name, said.get("mode", "min"), 1).best()
            if not found:
                raise UsageError(
                    f"--best: no checkpoint in {root} has a value of {name} that is a number; use --step N"
                )
            return found
    raise UsageError(f"--best: no checkpoint in {root} has a value of checkpoint.monitor; use --step N")


def _values(said: Mapping[str, Any]) -> dict[str, float]:
    values = said.get("monitor")
    return values if isinstance(values, dict) else {}


def _list(run_dir: Path, as_json: bool) -> int:
    found = [run_dir] if _is_checkpoint(run_dir) and run_dir.name.isdecimal() else store.steps(run_dir / "checkpoints")
    rows = [_row(path) for path in found]
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    if not rows:
        print(f"no checkpoints in {run_dir / 'checkpoints'}")
    for row in rows:
        known = row["values"].items()
        values = "  ".join(f"{name}={'nan' if value is None else f'{value:g}'}" for name, value in known)
        state = row["defect"] or values
        print(f"{row['step']:>9}  {row['time']}  {row['mib']:>9.1f} MiB  {row['ranks']:>5} ranks  {state}".rstrip())
    return 0


def _row(path: Path) -> dict[str, Any]:
    said = store.marker_of(path)
    sizes = [file.stat().st_size for file in path.iterdir() if file.is_file()]
    return {
        "step": int(path.name),
        "path": str(path),
        "time": datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M:%S"),
        "mib": sum(sizes) / 2**20,
        "ranks": said.get("world_size", 0),
        "values": {name: None if math.isnan(value) else value for name, value in _values(said).items()},
        "defect": store.defect(path),
    }
