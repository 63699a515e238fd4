"""Each source of settings as a tree: the script, files, the environment and the command line.

Keys are checked and spelt canonically here; values stay text. Faults are added to `problems`, so that one
load reports all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, cast

from ..errors import ConfigError, did_you_mean
from .convert import expected
from .names import wrong_variable
from .section import SHELL_VALUES
from .table import FREE, canonical, keys, nearest, refused, sections
from .text import Plain, ShellText, Typed, is_null, unquoted
from .tree import Leaf, Path, Tree, grow, merge, origin_of, show, values

SCRIPT = "phalanx.init()"
COMMAND_LINE = "command line"
Override = str | tuple[str, Any] | tuple[str, Any, str]

# Words of the topology and of launches, not settings.
RESERVED = frozenset(
    {
        "PHALANX_RANK",
        "PHALANX_WORLD_SIZE",
        "PHALANX_LOCAL_RANK",
        "PHALANX_LOCAL_WORLD_SIZE",
        "PHALANX_NODE_RANK",
        "PHALANX_NUM_NODES",
        "PHALANX_MASTER_ADDR",
        "PHALANX_MASTER_PORT",
        "PHALANX_RUN_DIR",
        "PHALANX_SITE",
        "PHALANX_CPUS_PER_RANK",
        "PHALANX_NUM_WORKERS_AUTO",
        "PHALANX_EXPECTED_WORLD_SIZE",
        "PHALANX_LAUNCH_ID",
        "PHALANX_VISIBLE_DEVICES",  # those that a launcher replaces by others
        "PHALANX_HOROVOD_RANKS",  # set by launchers that know nothing of Horovod
        "PHALANX_LOCAL_RANK_OPTION",  # for scripts written for torch.distributed.launch
        "PHALANX_RDZV_HOST",
        "PHALANX_RDZV_PORT",
    }
)


def from_script(arguments: Mapping[str, Any], problems: list[str]) -> Tree:
    """The keyword arguments of `phalanx.init()`: Python values."""
    return shape(cast("Tree", {key: grow(value, SCRIPT) for key, value in arguments.items()}), problems)


def from_file(path: str | FilePath, label: str, problems: list[str]) -> Tree:
    """A settings file; raises ConfigError if it cannot be read as a mapping."""
    from .yamlfile import read_file  # PyYAML costs start-up time, and most loads read no file

    return shape(read_file(path, label), problems)


def profiles(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """The site profile and the user's own file, as (path, label), if there are any."""
    found = []
    if environ.get("PHALANX_SITE"):
        found.append((_site(environ["PHALANX_SITE"]), "site profile "))
    user = _user_file(environ)
    if user is not None and user.is_file():
        found.append((str(user), "user file "))
    return found


def _site(name: str) -> str:
    """A profile's path, or the path of the shipped one of that name."""
    from ..sites import shipped

    if "/" in name or name.endswith((".yaml", ".yml")) or FilePath(name).exists():
        return name
    known = shipped()
    if name not in known:
        raise ConfigError(
            f"PHALANX_SITE={name!r}: no such profile; expected a file's path or one of {', '.join(known)}."
            f"{did_you_mean(name, known)}"
        )
    return str(known[name])


def _user_file(environ: Mapping[str, str]) -> FilePath | None:
    # The XDG base directory specification: an empty or relative XDG_CONFIG_HOME is to be ignored.
    base = environ.get("XDG_CONFIG_HOME", "")
    home = environ.get("HOME") or environ.get("USERPROFILE")
    if not os.path.isabs(base):  # noqa: PTH117 (pathlib has no test that takes an empty text)
        if not home:
            return None
        base = f"{home}/.config"
    return FilePath(base, "phalanx", "config.yaml")


def from_environment(environ: Mapping[str, str], problems: list[str]) -> Tree:
    """PHALANX_PRECISION, PHALANX_CHECKPOINT__EVERY_STEPS; an empty variable counts as unset."""
    tree: Tree = {}
    switch = environ.get("USE_CONTAINER", "").lower()
    if switch:
        runtime = "venv" if switch in ("0", "false", "no", "off") else "apptainer"
        tree = _override(("runtime",), runtime, "environment USE_CONTAINER", problems)
    if environ.get("MASTER_PORT") and not {"RANK", "WORLD_SIZE"} & environ.keys():  # else it is another launch's
        port = _override(("master_port",), environ["MASTER_PORT"], "environment MASTER_PORT", problems)
        tree = cast("Tree", merge(tree, port))
    for name in sorted(environ):
        if name.startswith("PHALANX_") and name not in RESERVED and environ[name]:
            path = tuple(name.removeprefix("PHALANX_").split("__"))
            lower = tuple(part.lower() for part in path)
            # Names of environment variables keep their case.
            key = ("env", *path[1:]) if lower[0] == "env" else lower
            layer = _override(key, environ[name], f"environment {name}", problems)
            tree = cast("Tree", merge(tree, layer))
    return tree


def from_overrides(overrides: Iterable[Override], problems: list[str], origin: str = COMMAND_LINE) -> list[Tree]:
    """One layer for each `key=value` (or pair) of the command line, or of what a third value names."""
    found = []
    for override in overrides:
        pair: Sequence[Any] = override.split("=", 1) if isinstance(override, str) else override
        if len(pair) not in (2, 3) or not pair[0]:
            problems.append(f"{override!r} on the command line: expected key=value")
        else:
            key, value, *other = pair
            found.append(_override(tuple(key.split(".")), value, other[0] if other else origin, problems))
    return found


def _override(path: Path, value: Any, origin: str, problems: list[str]) -> Tree:
    """A text is read as a command line's; Python's own lists stay what they are."""
    value = _flow_or_text(canonical(path), value) if isinstance(value, str) else value
    return shape({".".join(path): grow(value, origin)}, problems)


def _flow_or_text(path: Path, text: str) -> Any:
    """A YAML collection where one can stand, else the text itself, whatever it holds."""
    if path[0] == "params":
        return _free(text)
    if ".".join(path) in sections() and text.startswith("{"):
        from .yamlfile import parse_flow

        found = parse_flow(text)
        if found is not None and not (isinstance(found, dict) and _lacks_values(found)):
            return found
    return Plain(text)


def _free(text: str) -> Any:
    """A value of a section without types: a YAML collection, or text. Quotes around what may be a number, a bool or
    null say that it is text; others are a part of it."""
    if text.startswith(("[", "{")):
        from .yamlfile import parse_flow

        found = parse_flow(text)
        if found is not None and not (isinstance(found, dict) and _lacks_values(found)):
            return _typed(found)
    if (inner := unquoted(text)) is not None:
        return inner
    return Typed(text) if text else text


def _typed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    return Typed(value) if isinstance(value, Plain) else value


def _lacks_values(found: dict[str, Any]) -> bool:
    """`{epoch:02d}` is a file name's pattern, not a mapping of keys to nothing."""
    return any(item == "" for item in found.values())


def shape(raw: Tree, problems: list[str]) -> Tree:
    """`raw` with canonical keys, nested as the settings are; whatever is no setting becomes a problem."""
    shaped: Tree = {}
    _shape(raw, (), shaped, problems)
    return shaped


def _shape(raw: Tree, prefix: Path, shaped: Tree, problems: list[str]) -> None:
    for name, item in raw.items():
        if not isinstance(name, str) or not name:
            problems.append(f"{name!r} ({origin_of(item)}): a key must be a text")
            continue
        path = canonical((*prefix, *name.split(".")))
        key = ".".join(path)
        if path == ("slurm",) and isinstance(item, dict):
            _shape(item, (), shaped, problems)
        elif path[0] in FREE:
            _shape_free(path, item, shaped, problems)
        elif key in sections():
            _shape_section(key, path, item, shaped, problems)
        elif key not in keys():
            problems.append(_unknown(key, item))
        elif isinstance(item, dict) or item.value == {}:
            field = keys()[key]
            wanted = expected(field.annotation, field.metadata)
            problems.append(f"{key} ({origin_of(item)}): expected {wanted}, not a mapping")
        else:
            _put(shaped, path, item, problems)


def _shape_section(key: str, path: Path, item: Tree | Leaf, shaped: Tree, problems: list[str]) -> None:
    if isinstance(item, dict):
        _shape(item, path, shaped, problems)
    elif not is_null(item.value) and item.value != {}:
        inside = ", ".join(name for name in keys() if name.startswith(key + "."))
        problems.append(f"{key} = {show(item.value)} ({item.origin}): {key} is a section; set {inside}")


def _shape_free(path: Path, item: Tree | Leaf, shaped: Tree, problems: list[str]) -> None:
    section, *names = path
    if names:
        # No variable of the environment is nested: the rest of the path is its name.
        _put(shaped, (section, ".".join(names)) if section == "env" else path, item, problems)
    elif isinstance(item, Leaf):
        if not is_null(item.value) and item.value != {}:
            text = f"{section} is a section; set {section}.NAME"
            problems.append(f"{section} = {show(item.value)} ({item.origin}): {text}")
    else:
        for name, child in item.items():
            if isinstance(name, str) and name:
                _put(shaped, (section, name), child, problems)
            else:
                problems.append(f"{section}: {name!r} ({origin_of(child)}): a key must be a text")


def _put(shaped: Tree, path: Path, item: Tree | Leaf, problems: list[str]) -> None:
    """Set `path`; one source that sets a key twice (say by an alias too) contradicts itself."""
    if path[0] not in ("env", "tmpdir", "proxy") and _has_shell_text(values(item)):
        problems.append(f"{'.'.join(path)} ({origin_of(item)}): !sh is for values of {SHELL_VALUES} only")
        return
    wrong = wrong_variable(path[1]) if path[0] == "env" else None
    if wrong is not None:
        problems.append(f"env ({origin_of(item)}): {wrong}")
        return
    for part in path[:-1]:
        below = shaped.setdefault(part, {})
        if isinstance(below, Leaf):
            break
        shaped = below
    else:
        if path[-1] not in shaped:
            shaped[path[-1]] = item
            return
    problems.append(f"{'.'.join(path)} ({origin_of(item)}) is set twice, in two spellings")


def _has_shell_text(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_shell_text, value.values()))
    return isinstance(value, ShellText) or (isinstance(value, list) and any(map(_has_shell_text, value)))


def _unknown(key: str, item: Tree | Leaf) -> str:
    reason = refused(key) or nearest(key)
    hint = "" if key.partition(".")[0] in sections() else f" A script's own settings go under 'params:' (params.{key})."
    return f"unknown key {key!r} ({origin_of(item)}).{reason}{hint}"
