"""The configuration of DeepSpeed's engine: what the run decides, and the user's own JSON file for all else.

A value has one source. What the run decides may stand in the file too, if it is `auto` or says the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import JobConfig
from .global_batch import share_batch

_FREE = "auto"
_THE_RUNS = {
    "optimizer": "the training script makes the optimizer",
    "scheduler": "the training script makes the scheduler",
    "gradient_clipping": "run.clip_grad_norm clips",
    "amp": "precision decides",
    "torch_autocast": "precision decides",
}


def engine_config(config: JobConfig, batch_size: int | None = None, world_size: int | None = None) -> dict[str, Any]:
    """The whole configuration, as `deepspeed.initialize` takes it. `batch_size` is a rank's, if it is known.

    Raises ConfigError for a file that can't be read, or says something else than the run.
    """
    said = _read(config.deepspeed.config)
    for key, whose in _THE_RUNS.items():
        if said.pop(key, _FREE) not in (_FREE, None, 0, 0.0, {"enabled": False}):
            raise _conflict(config, key, f"{whose}: take it out of the file")
    _check_offload(config, said)
    own = _own(config)
    size, accumulate = batch_size or 1, config.accumulate
    if config.global_batch and batch_size and world_size:
        size, accumulate = share_batch(config, world_size, batch_size)
    sizes = {"train_micro_batch_size_per_gpu": size, "train_batch_size": size * world_size if world_size else None}
    if config.global_batch:
        sizes["train_batch_size"] = config.global_batch
    for key, value in sizes.items():
        given = said.pop(key, _FREE)
        known = batch_size is not None and value is not None
        if given != _FREE and known and str(given) != str(value):
            raise _conflict(config, key, f"{given} there, but the run's is {value} (the loader's batch_size is {size})")
    key = "gradient_accumulation_steps"
    given = said.pop(key, _FREE)
    known = not config.global_batch or (batch_size is not None and world_size is not None)
    if known and str(given) not in (_FREE, str(accumulate)):
        raise _conflict(config, key, f"{given} there, but the run has accumulate={accumulate}")
    _check_precision(config, said)
    merged = _merge(said, own, config)
    return {**merged, "train_micro_batch_size_per_gpu": size}


def _own(config: JobConfig) -> dict[str, Any]:
    settings = config.deepspeed
    zero: dict[str, Any] = {"stage": settings.zero_stage}
    if settings.offload == "cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
        zero |= {"offload_param": {"device": "cpu"}} if settings.zero_stage == 3 else {}
    # Accumulation is the run's: each step of the engine is one of the optimizer. DeepSpeed would clip at 1 unasked.
    steps = {"gradient_accumulation_steps": 1, "managed_gradient_accumulation": False, "gradient_clipping": 0.0}
    fp16 = {"fp16": {"enabled": True}} if config.precision == "fp16" else {}
    return {"zero_optimization": zero, **steps, **fp16}


def _check_offload(config: JobConfig, said: Mapping[str, Any]) -> None:
    """Where state lives decides how the engine is handled, so the setting has to say it."""
    for name in ("offload_optimizer", "offload_param"):
        offload = (said.get("zero_optimization") or {}).get(name)
        device = offload.get("device", _FREE) if isinstance(offload, dict) else _FREE
        if device == "nvme":
            raise ConfigError(f"{config.deepspeed.config}: NVMe offload isn't supported; set {name}.device to cpu")
        if config.deepspeed.offload == "none" and device not in (_FREE, "none"):
            what = f"{device} there, but the run has none (deepspeed.offload={device})"
            raise _conflict(config, f"zero_optimization.{name}.device", what)


def _check_precision(config: JobConfig, said: Mapping[str, Any]) -> None:
    """The engine's own 16-bit weights are the user's choice in the file; the run's precision must be the same."""
    for kind in ("fp16", "bf16"):
        asked = said.get(kind)
        enabled = asked.get("enabled") if isinstance(asked, dict) else asked
        if enabled is True and config.precision != kind:
            raise _conflict(config, kind, f"enabled there, but the run has precision={config.precision}")
        if kind == config.precision == "fp16" and enabled is False:
            raise _conflict(config, kind, "disabled there, but the run has precision=fp16")


def _merge(said: Mapping[str, Any], own: Mapping[str, Any], config: JobConfig, path: str = "") -> dict[str, Any]:
    """`own` laid over `said`; a leaf of both must be the same."""
    merged = dict(said)
    for key, value in own.items():
        name = f"{path}{key}"
        given = merged.get(key, _FREE)
        if isinstance(value, dict):
            merged[key] = _merge(given if isinstance(given, dict) else {}, value, config, f"{name}.")
        elif given not in (_FREE, value):
            raise _conflict(config, name, f"{given} there, but the run has {value}{_REMEDY.get(name, '')}")
        else:
            merged[key] = value
    return merged


_REMEDY = {
    "zero_optimization.stage": " (deepspeed.zero_stage)",
    "zero_optimization.offload_optimizer.device": " (deepspeed.offload)",
    "zero_optimization.offload_param.device": " (deepspeed.offload)",
}


def _conflict(config: JobConfig, key: str, what: str) -> ConfigError:
    return ConfigError(
        f"DeepSpeed's file {config.deepspeed.config} contradicts the run at {key}: {what}. A value has one source: "
        "remove it from the file, or set it to auto"
    )


def _read(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        said = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"deepspeed.config={path!r} can't be read: {error.strerror}; give a JSON file") from None
    except ValueError as error:
        raise ConfigError(f"deepspeed.config={path!r} is not JSON: {error}") from None
    if not isinstance(said, dict):
        raise ConfigError(f"deepspeed.config={path!r} holds {type(said).__name__}: expected an object of settings")
    if "bfloat16" in said:  # an older name
        said.setdefault("bf16", said.pop("bfloat16"))
    for name in ("zero_optimization", "fp16", "bf16"):
        if not isinstance(said.get(name, {}), dict):
            raise ConfigError(f"deepspeed.config={path!r}: {name} is {said[name]!r}: expected an object of settings")
    return said
