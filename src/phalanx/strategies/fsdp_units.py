"""Which modules FSDP gathers one at a time."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import ConfigError, UsageError, did_you_mean


def shard_units(model: nn.Module, wrap: tuple[str, ...]) -> list[nn.Module]:
    """The modules below the root that are gathered one at a time, inner ones first."""
    inside = [module for name, module in model.named_modules() if name]
    chosen: set[nn.Module] = set()
    for rule in wrap:
        if rule == "none":
            continue
        if rule == "auto":
            chosen |= {block for part in inside if isinstance(part, nn.ModuleList) for block in part}
        elif rule.startswith("size:") and rule[5:].isdecimal():
            chosen |= {part for part in inside if _size(part) >= int(rule[5:])}
        else:
            chosen |= _of_class(rule, inside)
    units = [part for part in inside if part in chosen and not isinstance(part, nn.ModuleList | nn.ModuleDict)]
    return [unit for unit in reversed(units) if any(True for _ in unit.parameters())]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _of_class(name: str, modules: list[nn.Module]) -> set[nn.Module]:
    found = {module for module in modules if type(module).__name__ == name}
    if not found:
        known = sorted({type(module).__name__ for module in modules})
        raise ConfigError(
            f"fsdp.wrap={name!r} matches no module of the model: expected auto, none, size:N or one of its "
            f"classes: {', '.join(known)}.{did_you_mean(name, known)}"
        )
    return found


def by_type(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """`units`, and each module of another type of parameters than what is around it: a unit has one type.

    Raises UsageError for a module with parameters of several types of its own.
    """
    types = {module: _types(module, recurse=False) for module in model.modules()}
    mixed = next((module for module, own in types.items() if len(own) > 1), None)
    if mixed is not None:
        raise UsageError(
            f"FSDP shards parameters of one type together, and {type(mixed).__name__} has "
            f"{' and '.join(sorted(map(str, types[mixed])))}: give them modules of their own, or use --strategy ddp"
        )
    main = next((kind for own in types.values() for kind in own), None)
    apart = [module for module, own in types.items() if own - {main} and module is not model]
    chosen = {*units, *apart}
    return [module for module in reversed(list(model.modules())) if module in chosen]


def _types(module: nn.Module, recurse: bool) -> set[torch.dtype]:
    return {p.dtype for p in module.parameters(recurse) if p.dim() > 0}


def shared_with_outside(model: nn.Module, units: list[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """`units` that own their parameters, and those that share some with modules outside (tied weights).

    Two units can't both shard a parameter: what is shared belongs to a unit, or the root, around all of its owners.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    shared = []
    for unit in units:
        inside = set(unit.modules())
        if any(not owners[parameter] <= inside for parameter in unit.parameters()):
            shared.append(unit)
    return [unit for unit in units if unit not in shared], shared
