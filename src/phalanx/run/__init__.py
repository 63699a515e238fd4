"""The API in a training script: `phalanx.init()` gives the `Run`."""

from .api import Run
from .setup import current, init

__all__ = ["Run", "current", "init"]
