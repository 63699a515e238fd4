"""The table of settings by dotted key, how keys may be spelt, and the nearest right one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import lru_cache

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .sbatch import BARE, REFUSED
from .schema import JobConfig
from .section import Section
from .tree import Path

# Of each group Slurm takes one.
RIVALS = (
    ("mem", "mem_per_cpu", "mem_per_gpu"),
    ("cpus_per_task", "cpus_per_gpu"),
    ("sbatch.requeue", "sbatch.no_requeue"),
)

# Sections whose names are the user's own.
FREE = ("env", "params")

ALIASES = {
    "num_nodes": "nodes",
    "num_tasks": "ntasks",
    "num_tasks_per_node": "ntasks_per_node",
    "memory": "mem",
    "std_out": "output",
    "std_err": "error",
    "err_out": "error",
    "run_name": "name",
    "nproc": "nproc_per_node",
    "distributed_strategy": "strategy",
    "dist_strat": "strategy",
    "python_venv": "venv",
    "pre_exec_command": "before",
    "pre_exec_cmd": "before",
    "experiment_name": "exp_name",
    "container_path": "container.image",
}

# The same for keys inside a section, as the runtimes' own options are called.
INNER_ALIASES = {
    "container.runtime": "runtime",
    "container.cleanenv": "container.clean_env",
    "container.bind": "container.binds",
}


@lru_cache(maxsize=1)
def keys() -> dict[str, FieldInfo]:
    """Every setting's dotted key, with type (`annotation`), `default` and `description`."""
    return dict(_walk(JobConfig))


@lru_cache(maxsize=1)
def sections() -> frozenset[str]:
    """The keys that hold other keys: `checkpoint`, `fsdp`, … and the free-form ones."""
    return frozenset([key.rpartition(".")[0] for key in keys() if "." in key] + list(FREE))


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _walk(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def canonical(path: Path) -> Path:
    """`path` with `-` as `_` and aliases replaced; names in free-form sections stay as they are.

    `slurm.X` is X, and an option of sbatch that is no setting of its own is in the section `sbatch`.
    """
    first = path[0].replace("-", "_")
    if first == "slurm" and len(path) > 1:
        return canonical(path[1:])
    if first in FREE:
        return (first, *path[1:])
    rest = tuple(part.replace("-", "_") for part in path[1:])
    if first in BARE and not rest:
        return ("sbatch", first)
    inner = INNER_ALIASES.get(".".join((first, *rest)))
    return tuple(inner.split(".")) if inner else (*ALIASES.get(first, first).split("."), *rest)


def nearest(key: str, others: Iterable[str] = ()) -> str:
    """` Did you mean 'x'?` for the nearest to `key` of settings and `others`, or an empty string."""
    spelt = {name: name for name in (*keys(), *sections(), *others)}
    spelt |= {name: name for name in ALIASES}
    spelt |= {name: name for name in BARE}
    for name in keys():
        spelt.setdefault(name.rpartition(".")[2], name)
    near = get_close_matches(key.replace("-", "_"), list(spelt), n=1, cutoff=0.6)
    return f" Did you mean {spelt[near[0]]!r}?" if near else ""


def refused(key: str) -> str:
    """Why an option that sbatch has can't be a setting, or an empty string."""
    reason = REFUSED.get(key.replace("-", "_"))
    return f" sbatch's --{key.replace('_', '-')} has no place in a job file: {reason}." if reason else ""
