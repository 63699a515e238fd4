"""Phalanx: one PyTorch training script, any number of processes, strategies, launchers and sites.

The names below are imported when first used, so that the command never imports torch. PYTEST_DONT_REWRITE: pytest may
find this package imported already, and would warn of it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .bound import add_packages, lacking

if TYPE_CHECKING:
    from .data.iterable import shard
    from .errors import PhalanxError
    from .rank.topology import Topology
    from .run import Run, current, init
    from .script.argument_parser import ArgumentParser
    from .script.epoch_timer import EpochTimer

__version__ = "0.1.0"

_PUBLIC = {
    "ArgumentParser": "script.argument_parser",
    "EpochTimer": "script.epoch_timer",
    "PhalanxError": "errors",
    "Run": "run",
    "Topology": "rank.topology",
    "current": "run",
    "init": "run",
    "shard": "data.iterable",
}
_WITH_TORCH = ("run", "data.iterable")

__all__ = [
    "ArgumentParser",
    "EpochTimer",
    "PhalanxError",
    "Run",
    "Topology",
    "__version__",
    "current",
    "init",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    module = _PUBLIC[name]
    if sys.version_info < (3, 10) and module not in ("errors", "rank.topology"):
        from .errors import MissingExtraError

        raise MissingExtraError(f"phalanx.{name} needs Python 3.10 or newer, and this is {sys.version.split()[0]}")
    if module in _WITH_TORCH:
        from .registry import require

        require("torch", "torch")
    try:
        return getattr(import_module(f"phalanx.{module}"), name)
    except ModuleNotFoundError as error:
        from .errors import MissingExtraError

        if lacking(error):
            raise MissingExtraError(lacking(error)) from None
        raise


add_packages()
