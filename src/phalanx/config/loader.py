"""From all layers to one checked configuration that knows where each value comes from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path as FilePath
from typing import Any, cast

from pydantic import ValidationError

from ..errors import ConfigError
from .convert import expected
from .exclusions import effects, replaced, with_command, without_rivals
from .interpolate import Resolver
from .layers import COMMAND_LINE, SCRIPT, Override, from_environment, from_file, from_overrides, from_script, profiles
from .schema import JobConfig
from .table import FREE, keys
from .tree import Leaf, Path, Tree, find, leaves, merge, origin_of, show, values

DEFAULT = "default"


@dataclass(frozen=True)
class Loaded:
    """A configuration and, by dotted key, the origin of each value.

    `overridden` has a sentence for each argument of `phalanx.init()` that another layer changed; `notes` say what
    else the reader should know: settings without effect, or replaced by another layer's.
    """

    config: JobConfig
    origins: dict[str, str]
    overridden: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def load_config(
    files: Iterable[str | FilePath] = (),
    overrides: Iterable[Override] = (),
    environ: Mapping[str, str] | None = None,
    *,
    script: Mapping[str, Any] | None = None,
    member: Mapping[str, str] | None = None,
    member_origin: str = "",
    now: datetime | None = None,
) -> Loaded:
    """All layers of settings, merged, interpolated and checked.

    From lowest: defaults, `script` (the arguments of `phalanx.init()`), the site profile (PHALANX_SITE), the
    user's file, `files`, PHALANX_* in `environ` (default: os.environ), `overrides` (`key=value`), and what a
    series sets in one of its jobs (`member`).
    Raises ConfigError that names every fault, each with its origin.
    """
    environ = os.environ if environ is None else environ
    problems: list[str] = []
    layers = []
    unreadable: list[str] = []
    for path, label in (*profiles(environ), *((path, "") for path in files)):
        try:
            layers.append(from_file(path, label, problems))
        except ConfigError as error:
            unreadable.append(str(error))
    if unreadable:  # without all layers, complaints about values would mislead
        raise _error(unreadable + problems)
    layers.append(from_environment(environ, problems))
    layers += from_overrides(overrides, problems)
    series = from_overrides((member or {}).items(), problems, member_origin)
    return assemble(from_script(script or {}, problems), layers, environ, now, problems, series)


def assemble(
    script: Tree,
    layers: Iterable[Tree],
    environ: Mapping[str, str],
    now: datetime | None,
    problems: list[str],
    series: Iterable[Tree] = (),
) -> Loaded:
    """Merge `layers` over `script`, resolve and validate; all faults, `problems` included, in one error.

    What the layers of a `series` replace is told in the notes.
    """
    above: Tree = {}
    notes: list[str] = []
    gave_way: dict[str, tuple[str, str]] = {}
    for layer in layers:
        _keep_lists_whole(above, layer, problems)
        above = without_rivals(above, layer, notes, problems, gave_way)
        above = cast("Tree", merge(above, layer))
    for layer in series:
        notes += replaced(above, layer)
        above = cast("Tree", merge(above, layer))
    if "strategy" in script and _is_auto(above.get("strategy")):
        del above["strategy"]  # auto leaves the choice to the script
    merged = cast("Tree", merge(script, above))
    now = now or datetime.now().astimezone()
    tree = Resolver(merged, environ, now, problems).resolve()
    config = _validate(tree, problems)
    if config is not None:
        config = with_command(config, problems).remembering(gave_way)
        notes += effects(config)
    overridden = _overridden(script, merged, config, environ, now, problems) if script else ()
    if problems or config is None:
        raise _error(problems)
    return Loaded(config, _origins(tree), tuple(overridden), tuple(notes))


def _is_auto(item: Tree | Leaf | None) -> bool:
    return isinstance(item, Leaf) and item.value == "auto"


def _keep_lists_whole(below: Tree, layer: Tree, problems: list[str]) -> None:
    """`params.betas.0=1` would replace the list `params.betas` by a mapping, which nobody means."""
    for path, leaf in leaves(layer):
        for length in range(1, len(path)):
            item = find(below, path[:length])
            if leaf.origin == COMMAND_LINE and isinstance(item, Leaf) and isinstance(item.value, list):
                inner, outer = ".".join(path), ".".join(path[:length])
                problems.append(f"{inner} ({leaf.origin}): {outer} is a list ({item.origin}); set it as a whole")


def _validate(tree: Tree, problems: list[str]) -> JobConfig | None:
    try:
        return JobConfig.model_validate(values(tree))
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            message = _explain(fault["loc"], tree, fault.get("ctx", {}).get("error"))
            if message not in problems:  # each member of a union complains
                problems.append(message)
        return None


def _explain(location: tuple[int | str, ...], tree: Tree, cause: Exception | None) -> str:
    path = _setting(location)
    key = ".".join(path)
    item = find(tree, path)
    origin = origin_of(item) if item else DEFAULT
    if cause is not None:
        return f"{key} = {show(values(item or {}))} ({origin}): {cause}"
    field = keys().get(key)
    wanted = expected(field.annotation, field.metadata) if field else "text"
    return f"{key} = {show(values(item or {}))} ({origin}): expected {wanted}"


def _setting(location: tuple[int | str, ...]) -> Path:
    """The part of pydantic's location that is a key; the rest names members of unions and items."""
    names = tuple(str(part) for part in location)
    if names[0] in FREE:
        return names[:2]
    lengths = (length for length in range(1, len(names) + 1) if ".".join(names[:length]) in keys())
    return names[: next(lengths, len(names))]


def _overridden(
    script: Tree,
    merged: Tree,
    config: JobConfig | None,
    environ: Mapping[str, str],
    now: datetime,
    problems: list[str],
) -> list[str]:
    """Sentences on arguments that a higher layer changed; the script's own values are checked as well."""
    ahead = Resolver(cast("Tree", merge(merged, script)), environ, now, problems).resolve()
    wanted = _validate(ahead, problems)
    if config is None or wanted is None:
        return []
    found = []
    for path, leaf in leaves(script):
        winner = find(merged, path)
        mine, theirs = _get(wanted, path), _get(config, path)
        key = ".".join(path)
        if mine == theirs or not isinstance(winner, Leaf) or (key == "strategy" and mine == "auto"):
            continue  # auto leaves the choice to the launch
        if key == "strategy":
            problems.append(
                f"strategy={mine!r} of {leaf.origin} contradicts strategy={theirs!r} ({winner.origin}): "
                "give the strategy in one place, or the same one in both"
            )
        found.append(f"{key}={mine!r} of {leaf.origin} is overridden by {theirs!r} ({winner.origin})")
    return found


def _get(config: JobConfig, path: Path) -> Any:
    item: Any = config
    for key in path:
        item = item.get(key) if isinstance(item, dict) else getattr(item, key, None)
    return item


def _origins(tree: Tree) -> dict[str, str]:
    origins = dict.fromkeys(keys(), DEFAULT)
    for path, leaf in leaves(tree):
        if path[0] in FREE:
            origins.pop(path[0], None)  # named one by one
        origins[".".join(path)] = leaf.origin
    return origins


def _error(problems: list[str]) -> ConfigError:
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        return ConfigError(unique[0])
    return ConfigError(f"{len(unique)} faults in the settings:\n" + "\n".join(f"  - {text}" for text in unique))


def load_run_config(run_dir: str | FilePath, script: Mapping[str, Any] | None = None) -> Loaded:
    """What a rank uses: what a launch wrote in `run_dir`, above the arguments of `phalanx.init()`.

    Raises ConfigError if the file is not there or the script's arguments are wrong or contradict it.
    """
    from .saved import read_saved

    problems: list[str] = []
    saved = read_saved(FilePath(run_dir), problems)
    return assemble(from_script(script or {}, problems), [saved], os.environ, None, problems)


__all__ = ["DEFAULT", "SCRIPT", "Loaded", "load_config", "load_run_config"]
