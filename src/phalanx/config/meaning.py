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

_SETTING = re.compile(r"(?<!\$)\{([A-Za-z_][\w.-]*)\}", re.ASCII)


def without_rivals(below: Tree, layer: Tree, notes: list[str], problems: list[str]) -> Tree:
    """`below` less what `layer` replaces by another way to say it (`mem` by `mem_per_cpu`)."""
    for group in RIVALS:
        said = {key: leaf for key in group if (leaf := _set(layer, key))}
        if len(said) > 1:
            names = " and ".join(f"{key} ({leaf.origin})" for key, leaf in said.items())
            problems.append(f"{names} exclude each other for Slurm: keep one of them")
        for key in group if said else ():
            old = _set(below, key)
            if old and key not in said:
                notes.append(f"{key}={show(old.value)} ({old.origin}) gives way to {next(iter(said))}")
                below = _without(below, tuple(key.split(".")))
    return below


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
