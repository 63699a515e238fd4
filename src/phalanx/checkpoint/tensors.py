"""A run's tensors under names that no strategy, world size or wrapper changes.

    model.<i>/<name>                 the i-th prepared model's state_dict, without wrappers' prefixes
    optim.<i>/<model>/<name>/<key>   the i-th optimizer's state for that parameter
    rng.<rank>/<generator>           a rank's generators

Sharded tensors are DTensors, which torch.distributed.checkpoint saves and loads by their global shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import CheckpointError, UsageError

_EXTRA = "_extra_state"  # torch's name for it in a state_dict


def parameter_names(models: list[Any]) -> dict[int, str]:
    """`<i>/<name>` of every parameter, by the parameter's identity; tied ones have their first name."""
    names: dict[int, str] = {}
    for index, model in enumerate(models):
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"{index}/{name}")
    return names


def facts(model: Any) -> dict[str, Any]:
    """For those who read its weights without it: names that mean a tensor of another name, and what is no tensor."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in chain(*named):
        if first.setdefault(id(tensor), name) != name:
            tied[name] = first[id(tensor)]
    known = set(first.values()) | set(tied)
    return {"tied": tied, "other": [name for name in _extra(model) if name not in known]}


def _extra(model: Any) -> list[str]:
    """Where modules have `get_extra_state`, whose values need not be tensors."""
    own = nn.Module.get_extra_state
    return [
        f"{name}.{_EXTRA}" if name else _EXTRA
        for name, module in model.named_modules()
        if type(module).get_extra_state is not own
    ]


def split(values: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, and the rest."""
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    return tensors, {key: value for key, value in values.items() if key not in tensors}


def model_entries(models: list[Any]) -> dict[str, Any]:
    return {f"model.{i}/{name}": value for i, model in enumerate(models) for name, value in model.state_dict().items()}


def optimizer_entries(optimizers: list[Optimizer], names: dict[int, str]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for index, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                entries[f"optim.{index}/{names[id(parameter)]}/{key}"] = value
    return entries


def optimizer_groups(optimizer: Optimizer, names: dict[int, str]) -> list[dict[str, Any]]:
    """Hyperparameters of each group, with its parameters by name."""
    try:
        return [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
    except KeyError:
        raise UsageError(
            "an optimizer holds a parameter of no prepared model: pass the model to run.prepare too"
        ) from None


def room_for_optimizer(
    index: int, optimizer: Optimizer, names: dict[int, str], saved: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Tensors to load the saved state of one optimizer into: placed like the parameter where the shape is its own."""
    room: dict[str, Tensor] = {}
    by_name = {names[id(parameter)]: parameter for group in optimizer.param_groups for parameter in group["params"]}
    prefix = f"optim.{index}/"
    for key, metadata in saved.items():
        if not key.startswith(prefix) or not isinstance(metadata, TensorStorageMetadata):
            continue
        parameter = by_name.get(key[len(prefix) :].rpartition("/")[0])
        if parameter is None:
            continue  # reported as an unexpected key
        dtype = metadata.properties.dtype
        if metadata.size == parameter.shape and _is_placed(key, parameter):
            room[key] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            room[key] = torch.zeros(metadata.size, dtype=dtype)
    return room


def _is_placed(key: str, parameter: nn.Parameter) -> bool:
    """Whether a state of the parameter's shape lies as it does. A scalar's might be a plain count."""
    return parameter.dim() > 0 or (isinstance(parameter, DTensor) and not key.endswith("/step"))


def room_for_rng(rank: int, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors to load a rank's generator states into."""
    return {
        key: torch.zeros(metadata.size, dtype=metadata.properties.dtype)
        for key, metadata in saved.items()
        if key.startswith(f"rng.{rank}/")
    }


def kind(optimizer: Any) -> str:
    """The class of the script's own optimizer."""
    return type(getattr(optimizer, "inner", optimizer)).__name__


def check_kind(index: int, optimizer: Optimizer, saved: str, groups: list[dict[str, Any]]) -> None:
    """Refuse another class of optimizer, unless its hyperparameters are all there, as AdamW's are for Adam."""
    lacking = sorted(set(optimizer.param_groups[0]) - set(groups[0]))
    if saved != kind(optimizer) and lacking:
        raise CheckpointError(
            f"optimizer {index} is {kind(optimizer)}, but the checkpoint was saved with {saved}, which has no "
            f"{', '.join(map(repr, lacking))}: resume with the same optimizer"
        )


def load_optimizer(
    index: int,
    optimizer: Optimizer,
    names: dict[int, str],
    groups: list[dict[str, Any]],
    values: Mapping[str, Any],
) -> None:
    """Set an optimizer's state through its own `load_state_dict`, parameters matched by name."""
    own = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    theirs = [group["params"] for group in groups]
    if [sorted(group) for group in own] != [sorted(group) for group in theirs]:
        raise CheckpointError(
            f"optimizer {index} has parameter groups {_brief(own)}, but the checkpoint has {_brief(theirs)}: "
            "build it with the same groups"
        )
    position = {name: at for at, name in enumerate(name for group in own for name in group)}
    state: dict[int, dict[str, Any]] = {}
    prefix = f"optim.{index}/"
    for key, value in values.items():
        if key.startswith(prefix):
            name, _, item = key[len(prefix) :].rpartition("/")
            state.setdefault(position[name], {})[item] = value
    packed = [{**saved, "params": [position[name] for name in mine]} for saved, mine in zip(groups, own, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": packed})


def _brief(groups: list[list[str]]) -> str:
    return " + ".join(f"{len(group)} ({', '.join(group[:3])}{', …' if len(group) > 3 else ''})" for group in groups)


def check_keys(wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Strictness: every key of either side is on the other, with the same global shape."""
    missing = sorted(set(wanted) - set(saved))
    unexpected = sorted(key for key in set(saved) - set(wanted) if not key.startswith("rng."))
    shapes = [
        f"{key}: {tuple(saved[key].size)} saved, {tuple(value.shape)} here"
        for key, value in wanted.items()
        if isinstance(saved.get(key), TensorStorageMetadata) and saved[key].size != value.shape
    ]
    problems = [
        f"{word}: {', '.join(keys[:5])}{f' and {len(keys) - 5} more' if len(keys) > 5 else ''}"
        for word, keys in (
            ("missing in it", missing),
            ("unknown here", unexpected),
            ("of another shape", shapes),
        )
        if keys
    ]
    if problems:
        raise CheckpointError(
            f"the checkpoint does not fit this model and optimizer; {'; '.join(problems)}. "
            "Resume with the model and optimizer that it was saved from"
        )
