"""`phalanx config`: the settings as they stand after all layers, where they come from, their schema."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from ..config import JobConfig, Loaded, load_config
from ..errors import UsageError
from .options import scan

HELP = """\
usage: phalanx config [-c FILE]... [--explain | --schema] [--KEY VALUE | KEY=VALUE]...

Print the settings after all layers as YAML, which -c reads again; in place of secrets it names variables that are to
hold them. Nothing is started.

  -c, --config FILE  settings from a YAML file; given again, the later file wins
      --explain      every setting with its value and the layer that set it
      --schema       the JSON schema of settings files, for editors
      --KEY VALUE    one setting, as KEY=VALUE; sections by dots: --checkpoint.keep 5
  -h, --help         this help

Layers, lowest first: defaults, phalanx.init() in the script (not known here), the site profile
(PHALANX_SITE), the user file (~/.config/phalanx/config.yaml), files of -c, PHALANX_* in the
environment, the command line."""


def main(argv: Sequence[str]) -> int:
    """`argv` without `config`; the result is the exit code."""
    scanned = scan(argv, script=False, flags=("explain", "schema"))
    if "help" in scanned.flags:
        print(HELP)
        return 0
    if {"explain", "schema"} <= scanned.flags:
        raise UsageError("--explain and --schema are two different outputs: give one of them")
    if "schema" in scanned.flags:
        print(json.dumps(JobConfig.model_json_schema(), indent=2))
        return 0
    loaded = load_config(scanned.files, scanned.overrides)
    if "explain" in scanned.flags:
        _explain(loaded)
    else:
        from ..config.hidden import referring
        from ..config.saved import chosen, dump

        print(dump(referring(chosen(loaded))), end="")
    return 0


def _explain(loaded: Loaded) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("key", "value", "origin")
    for key, value in _rows(loaded):
        cells = (key, _show(value), loaded.origins[key])
        style = "dim" if loaded.origins[key] == "default" else ""
        table.add_row(*(Text(cell, style, overflow="fold") for cell in cells))
    # Into a pipe or a file, a row is a line, however long.
    width = None if sys.stdout.isatty() else 10_000
    Console(width=width, highlight=False).print(table)


def _rows(loaded: Loaded) -> list[tuple[str, Any]]:
    from ..config.hidden import referring
    from ..config.saved import entries, is_idle

    found = entries(referring(loaded.config.model_dump()))
    return [(".".join(path), value) for path, value in found if not is_idle(path, value)]


def _show(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(_show(item) for item in value) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    # Quotes show what a look cannot: that `"0123"` is text and 123 a number.
    return repr(value) if isinstance(value, str) else str(value)
