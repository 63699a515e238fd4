"""One process; nothing to synchronise."""

from __future__ import annotations

from .base import Strategy


class Single(Strategy):
    name = "single"
