"""Seeds of the process's random number generators, and their states as tensors for checkpoints."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor

from ..data.seeding import mix


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's (if it is imported) and torch's generators, on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def seed_rank(seed: int, *parts: int) -> None:
    """Seed this rank's generators by (seed, parts…), unlike any other combination's."""
    seed_all(mix(seed, *parts))


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """This rank's generator states."""
    _, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
    }
    if "numpy" in sys.modules:
        _, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
        state["numpy_gauss"] = torch.tensor([cached], dtype=torch.float64)
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Put back what `rng_state` gave; generators that it lacks stay as they are."""
    torch.set_rng_state(state["torch"])
    gauss = state["python_gauss"].item()
    random.setstate((3, tuple(state["python"].tolist()), None if gauss != gauss else gauss))
    if "numpy" in state:
        import numpy as np

        *keys, position, has_gauss = state["numpy"].tolist()
        cached: Any = state["numpy_gauss"].item()
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
