"""The setting `ddp.sync_batchnorm`: BatchNorm over the batches of all ranks, under every strategy."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import PlanError, UsageError
from ..strategies.base import Strategy

_OWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_BASE = nn.modules.batchnorm._BatchNorm


def synchronised(model: nn.Module, strategy: Strategy) -> nn.Module:
    """`model` with torch's SyncBatchNorm in place of BatchNorm, if that is asked for and there are several ranks.

    Parameters and buffers stay the very same, so optimizers may have been built before. Raises PlanError where torch
    has no SyncBatchNorm, UsageError for a BatchNorm of another kind.
    """
    if not strategy.config.ddp.sync_batchnorm or strategy.topology.world_size == 1:
        return model
    inner = strategy.unwrap(model)
    found = {name: module for name, module in inner.named_modules() if _to_replace(module)}
    for name, module in found.items():
        if type(module) not in _OWN:
            raise UsageError(
                f"ddp.sync_batchnorm can't replace {name or 'the model'}, a {type(module).__name__}: its own "
                "forward would be lost. Convert it in the script (an nn.SyncBatchNorm stays as it is), or leave the "
                "setting out"
            )
    if found and strategy.device.type != "cuda":
        raise PlanError(
            "ddp.sync_batchnorm needs CUDA devices, where torch has its SyncBatchNorm, and this run's device is "
            f"{strategy.device.type!r}: leave it out here (each rank's BatchNorm then sees its own batch alone), or "
            "train on GPUs"
        )
    return _replaced(model, {})


def _to_replace(module: nn.Module) -> bool:
    return isinstance(module, _BASE) and not isinstance(module, nn.SyncBatchNorm)


def _replaced(module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
    """`module` or its substitute, with its children replaced; a module that stands in two places is one there too."""
    if module not in done:
        done[module] = module
        for name, child in list(module._modules.items()):
            if child is not None:
                module._modules[name] = _replaced(child, done)
        if _to_replace(module):
            done[module] = _sync(module)
    return done[module]


def _sync(module: Any) -> nn.Module:
    other: Any = nn.SyncBatchNorm(
        module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
    )
    other._parameters, other._buffers = module._parameters, module._buffers
    other.training = module.training
    result: nn.Module = other
    return result
