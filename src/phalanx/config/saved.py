"""Settings as YAML that reads back exactly, and the two files of them in a run directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from ..rundir import opener
from . import hidden
from .interpolate import escape
from .layers import SCRIPT, from_file
from .loader import DEFAULT, Loaded
from .tree import Leaf, Path, Tree
from .yamlfile import Reference, write

CONFIG_FILE = "config.yaml"
_COMMANDS_OWN = ("save_script", "submit_job", "save_dir")
_OF_SERIES = ("mode", "strategies", "scalability_nodes", "scalability_nproc", "repeats")  # a member is one run
ORIGINS_FILE = "origins.json"


def dump(settings: Mapping[str, Any]) -> str:
    """`settings` as YAML; text that holds `${` is escaped, so that it comes back as it is."""
    return write(_escaped(settings))


def _escaped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escaped(item) for item in value]
    return escape(value) if isinstance(value, str) and not isinstance(value, Reference) else value


def chosen(loaded: Loaded, keep: Callable[[str], bool] = lambda _: True) -> dict[str, Any]:
    """The settings whose origin `keep` accepts, nested as in a file."""
    picked: dict[str, Any] = {}
    for path, value in entries(loaded.config.model_dump()):
        key = ".".join(path)
        if not is_idle(path, value) and keep(loaded.origins.get(key, DEFAULT)):
            section = picked
            for name in path[:-1]:
                section = section.setdefault(name, {})
            section[path[-1]] = value
    return picked


def is_idle(path: Path, value: Any) -> bool:
    """sbatch's own options are listed only where they are used: there are about eighty."""
    return path[0] == "sbatch" and value is None


def entries(settings: Mapping[str, Any], path: Path = ()) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    for key, value in settings.items():
        here = (*path, key)
        found += entries(value, here) if isinstance(value, Mapping) and value else [(here, value)]
    return found


def run_config_text(loaded: Loaded) -> str:
    """config.yaml of a run: what was set above defaults and script, less what was meant for the command alone."""
    settings = chosen(loaded, lambda origin: origin not in (DEFAULT, SCRIPT))
    own = _COMMANDS_OWN if loaded.config.mode == "single" else (*_COMMANDS_OWN, *_OF_SERIES)
    settings = {key: value for key, value in settings.items() if key not in own}
    settings = {key: value for key, value in hidden.without(settings).items() if value != {}}
    return dump(settings) if settings else ""


def save_run_config(loaded: Loaded, run_dir: str | FilePath) -> None:
    """Write config.yaml and origins.json in `run_dir`, each whole or not at all."""
    folder = FilePath(run_dir)
    origins = {key: origin for key, origin in loaded.origins.items() if origin not in (DEFAULT, SCRIPT)}
    _write(folder / ORIGINS_FILE, json.dumps(origins, indent=1, ensure_ascii=True) + "\n")
    _write(folder / CONFIG_FILE, run_config_text(loaded))


def _write(path: FilePath, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8", newline="\n", opener=opener) as file:
            file.write(text)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_saved(run_dir: FilePath, problems: list[str]) -> Tree:
    """What `save_run_config` wrote, with the origins of the launch where they are known."""
    tree = from_file(run_dir / CONFIG_FILE, "", problems)
    try:
        origins = json.loads((run_dir / ORIGINS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return tree
    return _relabel(tree, origins)


def _relabel(tree: Tree, origins: Mapping[str, str], path: Path = ()) -> Tree:
    labelled: Tree = {}
    for key, item in tree.items():
        here = (*path, key)
        if isinstance(item, Leaf):
            labelled[key] = replace(item, origin=origins.get(".".join(here), item.origin))
        else:
            labelled[key] = _relabel(item, origins, here)
    return labelled
