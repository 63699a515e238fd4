"""What settings mean to each other: those that exclude one another, and those that stand for others."""

from __future__ import annotations

import re
from typing import Any

from ..shell import MARK
from .schema import JobConfig
from .slurm_schema import WITHOUT_EFFECT
from .table import FREE, RIVALS, canonical, keys
from .text import is_null
from .tree import Leaf, Path, Tree, find, leaves, show

PER_GPU = ("mem_per_gpu", "cpus_per_gpu")  # shares of each GPU
_SETTING = re.compile(r"(?<!\$)\{([A-Za-z_][\w.-]*)\}", re.ASCII)

# Words that ask for GPUs, not those that only speak of them: --constraint, --gpu-bind, --comment, …
_ASKS = re.compile(r"--(gres|gpus|(gpus|tres)-per-\w+)(?![\w-])")


def without_rivals(
    below: Tree, layer: Tree, notes: list[str], problems: list[str], gave_way: dict[str, tuple[str, str]]
) -> Tree:
    """`below` less what `layer` replaces by another way to say it (`mem` by `mem_per_cpu`); `gave_way` gets what gave
    way to a share of each GPU, and to which."""
    for group in RIVALS:
        said = {key: leaf for key in group if (leaf := _set(layer, key))}
        if len(said) > 1:
            names = " and ".join(f"{key} ({leaf.origin})" for key, leaf in said.items())
            problems.append(f"{names} exclude each other for Slurm: keep one of them")
        for key in group if said else ():
            old = _set(below, key)
            if old and key not in said:
                winner = next(iter(said))
                notes.append(f"{key}={show(old.value)} ({old.origin}) gives way to {winner}")
                if winner in PER_GPU and "${" not in str(old.value):
                    gave_way[key] = (winner, str(old.value))
                below = _without(below, tuple(key.split(".")))
    return below


def no_gpus(config: JobConfig) -> bool:
    """Whether a job with these settings asks for no GPUs, so that a share of each says nothing."""
    sbatch = config.sbatch.model_dump()
    counts = [config.gpus_per_node, config.gpus_per_task, sbatch.get("gpus"), sbatch.get("gpus_per_socket")]
    asking = [word for word in config.sbatch_args if _ASKS.match(word)]
    texts = [config.gres, sbatch.get("tres_per_task"), *asking]
    return not any(count and str(count) != "0" for count in counts) and not any(
        re.search(r"\bgpu(?!:(\w+:)?0\b)", text.replace("gpus", "gpu")) for text in texts if text
    )


def without_shares(config: JobConfig) -> tuple[JobConfig, list[str]]:
    """The settings of a job without GPUs with what gave way to a share of each in its place again, and notes."""
    if not no_gpus(config):
        return config, []
    update: dict[str, Any] = {}
    notes = []
    for key, (share, value) in config.gave_way.items():
        if getattr(config, share) is not None and getattr(config, key) is None:
            update |= {key: value, share: None}
            notes.append(f"{share} has no effect without GPUs: {key}={value} holds")
    return config.model_copy(update=update), notes


def _set(tree: Tree, key: str) -> Leaf | None:
    """The leaf of `key` if it asks for something."""
    leaf = find(tree, tuple(key.split(".")))
    return leaf if isinstance(leaf, Leaf) and asks(leaf.value) else None


def asks(value: Any) -> bool:
    """Whether a value of one of `RIVALS` asks for something: neither null nor false."""
    return not is_null(value) and str(value).lower() not in ("false", "no", "off")


def _without(tree: Tree, path: Path) -> Tree:
    """A copy of `tree` less the leaf at `path`."""
    first, *rest = path
    kept = {name: item for name, item in tree.items() if name != first}
    inner = tree[first]
    return {**kept, first: _without(inner, tuple(rest))} if rest and isinstance(inner, dict) else kept


def replaced(below: Tree, layer: Tree) -> list[str]:
    """Sentences on what `layer` sets over other values of `below`."""
    found = []
    for path, leaf in leaves(layer):
        old = find(below, path)
        if isinstance(old, Leaf) and old.value != leaf.value:
            key = ".".join(path)
            found.append(f"{key}={show(old.value)} ({old.origin}) gives way to {show(leaf.value)} ({leaf.origin})")
    return found


def effects(config: JobConfig) -> list[str]:
    """Sentences on settings that are accepted and do nothing."""
    found = [f"{key} has no effect in phalanx" for key in WITHOUT_EFFECT if getattr(config, key) is not None]
    for key in PER_GPU if no_gpus(config) else ():
        if getattr(config, key) is not None and key not in {share for share, _ in config.gave_way.values()}:
            found.append(f"{key}={getattr(config, key)} has no effect: the job asks for no GPUs")
    if config.exec_command and config.training_cmd:
        found.append("exec_command stands in place of training_cmd")
    return found


def with_command(config: JobConfig, problems: list[str]) -> JobConfig:
    """`{key}` of exact settings' names in `training_cmd` replaced; `use_ray` as the launcher that it means."""
    update: dict[str, str] = {}
    if config.use_ray and config.launcher == "auto":
        update["launcher"] = "ray"
    if config.training_cmd is not None and "{" in config.training_cmd:
        update["training_cmd"] = _SETTING.sub(lambda match: _value(config, match, problems), config.training_cmd)
    return config.model_copy(update=update) if update else config


def _value(config: JobConfig, match: re.Match[str], problems: list[str]) -> str:
    if match[1] == "itwinai_launcher":
        return f"{config.venv.rstrip('/')}/bin/itwinai" if config.venv else "itwinai"
    path = canonical(tuple(match[1].split(".")))
    if ".".join(path) not in keys() or path[0] in (*FREE, "training_cmd"):
        return match[0]
    value: Any = config
    for name in path:
        value = getattr(value, name)
    if value is None:
        problems.append(f"training_cmd has {match[0]}, and {'.'.join(path)} is unset: set it, or leave that out")
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).removeprefix(MARK)
