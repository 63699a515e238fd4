"""A checkpoint's weights as one file, without ranks, GPU or script: whole tensors under the module's own names."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from ..errors import CheckpointError, UsageError
from ..registry import require
from . import store


def export(checkpoint: Path, out: Path, model: int) -> int:
    """Write model number `model` of a checkpoint into `out`, whole or not at all; the number of tensors.

    `.safetensors` has each tied tensor once, and which names mean it too in its metadata, as safetensors' own
    `save_model` does. Anything else is a file of `torch.save`, where tied tensors stay tied.
    """
    facts = _facts(checkpoint, model)
    weights = _weights(checkpoint, f"model.{model}/")
    facts["other"] = [name for name in facts["other"] if name not in weights]  # some are tensors after all
    for name, first in facts["tied"].items():
        weights[name] = weights[first]
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        if out.suffix == ".safetensors":
            _safetensors(weights, facts, part)
        else:
            others = _others(checkpoint, f"model.{model}/") if facts["other"] else {}
            with part.open("wb") as file:  # torch's own writer would hide the disk's error
                torch.save({**weights, **others}, file)
        part.replace(out)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
    return len(weights)


def _facts(checkpoint: Path, model: int) -> dict[str, Any]:
    """What the marker says of a model: tied names and entries that are no tensors. Older checkpoints don't."""
    models = store.marker_of(checkpoint).get("models")
    facts: dict[str, Any] = models[model] if isinstance(models, list) and model < len(models) else {}
    return {"tied": {}, "other": [], **facts}


def _weights(checkpoint: Path, prefix: str) -> dict[str, Tensor]:
    try:
        saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        room = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in saved.items()
            if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        if not room:
            numbers = sorted({key.partition("/")[0] for key in saved if key.startswith("model.")})
            known = ", ".join(numbers) or "no model"
            raise UsageError(f"checkpoint {checkpoint} has no {prefix[:-1]}: it holds {known}")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(room, checkpoint_id=checkpoint, no_dist=True)
    except (CheckpointException, OSError, pickle.UnpicklingError, EOFError) as error:
        failures = getattr(error, "failures", None)
        cause = failures[0][0] if failures else error
        sentence = str(cause).strip().partition("\n")[0]
        raise CheckpointError(f"checkpoint {checkpoint} can't be read: {type(cause).__name__}: {sentence}") from None
    return {key[len(prefix) :]: value for key, value in room.items()}


def _others(checkpoint: Path, prefix: str) -> dict[str, Any]:
    state = torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=False)  # the user's own run wrote it
    return {key[len(prefix) :]: value for key, value in state["other"].items() if key.startswith(prefix)}


def _safetensors(weights: dict[str, Tensor], facts: dict[str, Any], path: Path) -> None:
    if facts["other"]:
        raise UsageError(
            f"{', '.join(facts['other'][:3])} of the model is no tensor, and safetensors holds nothing else: export to "
            "a .pt file"
        )
    kept = {name: value.contiguous() for name, value in weights.items() if name not in facts["tied"]}
    require("safetensors.torch", "export").save_file(kept, path, metadata={"format": "pt", **facts["tied"]})
