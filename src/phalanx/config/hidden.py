"""Secrets among the settings: what is left out of every file, and in which variables it travels instead.

Those of `env` and `proxy` have variables anyway. One of `params` gets a variable of its own, and the run's settings
file refers to that: `token: "${oc.env:SECRET_PARAMS_TOKEN}"`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .. import secret
from .names import texts
from .schema import JobConfig
from .yamlfile import Reference


def open_texts(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Every text that is written down as it is, with its dotted key."""
    return ((key, text) for key, text in texts(config.model_dump()) if not key.startswith("proxy."))


def proxies(config: JobConfig) -> dict[str, str]:
    """The proxies that are secret, by the variable that has them."""
    return {f"{name}_proxy": text for name, text in config.proxy.model_dump().items() if secret.looks_secret(text)}


def params(config: JobConfig) -> dict[str, str]:
    """The variables of the script's own settings that are secret."""
    return {_variable(path): text for path, text in _secrets(config.params, ("params",))}


def without(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, nested as in a file, for a run directory: secrets left out, or referred to."""
    kept = referring(settings)
    for section in {"env", "proxy"} & kept.keys():
        kept[section] = {name: text for name, text in kept[section].items() if not isinstance(text, Reference)}
    return kept


def referring(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same with a reference in place of each secret, also of those that ranks need not read."""
    kept = dict(settings)
    for name in secret.only(kept.get("env", {})):
        kept["env"] = {**kept["env"], name: Reference(f"${{oc.env:{name}}}")}
    for name, text in kept.get("proxy", {}).items():
        if secret.looks_secret(text):
            kept["proxy"] = {**kept["proxy"], name: Reference(f"${{oc.env:{name}_proxy}}")}
    if "params" in kept:
        kept["params"] = _referring(kept["params"], ("params",))
    return kept


def _is_secret(path: tuple[str, ...], value: object) -> bool:
    name = next(part for part in reversed(path) if not part.isdecimal())
    return isinstance(value, str) and bool(value) and secret.is_secret(name, value)


def _secrets(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, item in _items(value):
        yield from _secrets(item, (*path, key))
    if _is_secret(path, value):
        yield path, value


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return ((str(key), item) for key, item in value.items())
    return ((str(index), item) for index, item in enumerate(value)) if isinstance(value, (list, tuple)) else iter(())


def _referring(value: Any, path: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        return {key: _referring(item, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_referring(item, (*path, str(index))) for index, item in enumerate(value)]
    return Reference(f"${{oc.env:{_variable(path)}}}") if _is_secret(path, value) else value


def _variable(path: tuple[str, ...]) -> str:
    return "SECRET_" + re.sub(r"\W", "_", "_".join(path), flags=re.ASCII).upper()
