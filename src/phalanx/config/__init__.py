"""Settings: layered, typed, each with its origin.

The names below are imported when first used: reading YAML alone needs no pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layers import RESERVED
    from .loader import Loaded, load_config, load_run_config
    from .saved import save_run_config
    from .schema import JobConfig
    from .table import keys

_PUBLIC = {
    "JobConfig": "schema",
    "Loaded": "loader",
    "RESERVED": "layers",
    "keys": "table",
    "load_config": "loader",
    "load_run_config": "loader",
    "save_run_config": "saved",
}

__all__ = ["RESERVED", "JobConfig", "Loaded", "keys", "load_config", "load_run_config", "save_run_config"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'phalanx.config' has no attribute {name!r}")
    return getattr(import_module(f"phalanx.config.{_PUBLIC[name]}"), name)
