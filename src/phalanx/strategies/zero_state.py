"""What ZeRO has sharded, as a checkpoint wants it: whole fp32 tensors under the model's own names, on the CPU.

All of it by DeepSpeed's own `safe_get_*` and `safe_set_*`, which are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn
from torch.optim import Optimizer

_COUNTS = ("step", "mu_product", "eta", "mu")  # state of torch's optimizers that is one number for a parameter


def _sharded(parameter: nn.Parameter) -> bool:
    """Whether stage 3 has taken the weights away."""
    return hasattr(parameter, "ds_id")


def _shape(parameter: nn.Parameter) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def own_part(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """This rank's part at stage 3, where the last one is filled up with zeros."""
    own: Any = parameter
    size = int(own.ds_tensor.ds_numel)
    padded = torch.zeros(size * torch.distributed.get_world_size(), dtype=value.dtype)
    padded[: value.numel()] = value.flatten()
    return padded.narrow(0, size * torch.distributed.get_rank(), size)


def _weights(parameter: nn.Parameter) -> Tensor:
    if not _sharded(parameter) and parameter.dtype == torch.float32:
        return parameter.detach()
    master: Tensor | None = safe_get_full_fp32_param(parameter)
    if master is not None:
        return master
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _set_weights(parameter: nn.Parameter, value: Tensor) -> None:
    """Both those that the forward uses and the fp32 masters, if they are two."""
    together = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=_sharded(parameter))
    with torch.no_grad(), together:
        parameter.data.copy_(value.view(parameter.shape))
    if _sharded(parameter) and parameter.requires_grad:
        safe_set_local_fp32_param(parameter, own_part(parameter, value))
    else:
        safe_set_full_fp32_param(parameter, value.to(parameter.device))


class LossScale:
    """ZeRO's loss scale of fp16, with the entries that torch's gradient scaler has."""

    def __init__(self, zero: Callable[[], Any]) -> None:
        self._zero = zero  # made after this

    def state_dict(self) -> dict[str, Any]:
        own = dict(vars(self._zero().loss_scaler))
        scale = {"scale": own["cur_scale"], "_growth_tracker": 0}
        return {**scale, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "zero": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self._zero().loss_scaler).update(state.get("zero", {"cur_scale": state["scale"]}))


class ZeroModel:
    """A model under ZeRO, with the state_dict that it has without."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        return {
            name: _weights(parameters[name]).detach().to("cpu", copy=True) if name in parameters else value
            for name, value in self._model.state_dict().items()
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name, value in values.items():
            if name in parameters:
                _set_weights(parameters[name], value)
        rest = {name: value for name, value in values.items() if name not in parameters}
        self._model.load_state_dict(rest, strict=False)


class ZeroOptimizer:
    """The script's optimizer with the groups and state that it has without ZeRO.

    `zero` is ZeRO's optimizer around it, `groups` the parameters of each group before ZeRO flattened them, `places` the
    groups that ZeRO has: not those without a trainable parameter.
    """

    def __init__(self, optimizer: Optimizer, zero: Any, groups: list[list[nn.Parameter]], places: list[int]) -> None:
        self.inner = optimizer
        self._zero = zero
        self._groups = groups
        self._places = places

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        pairs = zip(self.inner.param_groups, self._groups, strict=True)
        return [{**group, "params": parameters} for group, parameters in pairs]

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        self._link()
        found: dict[nn.Parameter, dict[str, Any]] = {}
        for parameters, flats in zip(self._groups, self._flats(), strict=True):
            sample = self.inner.state.get(flats[0], {}) if flats else {}
            for parameter in (p for p in parameters if sample and p.requires_grad and _shape(p).numel()):
                found[parameter] = {key: _entry(parameter, flats[0], key, value) for key, value in sample.items()}
        return found

    def _flats(self) -> list[list[Tensor]]:
        """The flat pieces that this rank's optimizer steps, group by group."""
        zero = self._zero
        flats: list[list[Tensor]] = [[] for _ in self._groups]
        if hasattr(zero, "fp32_partitioned_groups_flat"):
            for at, flat in enumerate(zero.fp32_partitioned_groups_flat):
                flats[self._places[zero.sub_group_to_group_id[at]]].append(flat)
        else:
            for place, flat in zip(self._places, zero.single_partition_of_fp32_groups, strict=True):
                flats[place].append(flat)
        return flats

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for group, values in zip(self.inner.param_groups, saved["param_groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
        numbered = [parameter for group in self._groups for parameter in group]
        states = {numbered[at]: state for at, state in saved["state"].items() if numbered[at].requires_grad}
        self._make_room(states)
        for parameter, state in states.items():
            for key, value in state.items():
                if _is_whole(key, value, _shape(parameter)):
                    _set_entry(parameter, key, value)

    def _make_room(self, states: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """A fresh optimizer has no state yet, and DeepSpeed sets only what is there."""
        for parameters, flats in zip(self._groups, self._flats(), strict=True):
            sample = next((states[parameter] for parameter in parameters if parameter in states), {})
            shape = _shape(next(p for p in parameters if p in states)) if sample else None
            for flat in flats:
                self.inner.state[flat] = {
                    key: torch.zeros_like(flat) if _is_whole(key, value, shape) else _copied(value)
                    for key, value in sample.items()
                }
        self._link()

    def _link(self) -> None:
        """Stages 1 and 2 find a parameter's state by links, which DeepSpeed makes after the first group's first step,
        when the other groups have no state yet."""
        if hasattr(self._zero, "_hp_optimizer_states_linked") and self.inner.state:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()


def _is_whole(key: str, value: Any, shape: torch.Size | None) -> bool:
    """Whether it has an element for each of the parameter's, which may itself be of no dimension."""
    return isinstance(value, Tensor) and value.shape == shape and (value.dim() > 0 or key not in _COUNTS)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _entry(parameter: nn.Parameter, flat: Tensor, key: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.shape == flat.shape and value.dim() > 0:
        whole: Tensor = safe_get_full_optimizer_state(parameter, key)
        return whole.detach().to("cpu", copy=True)
    return _copied(value)


def _set_entry(parameter: nn.Parameter, key: str, value: Tensor) -> None:
    if not value.numel():
        return  # ZeRO has no such parameter
    if _sharded(parameter):
        safe_set_local_optimizer_state(parameter, own_part(parameter, value), key)
    else:
        safe_set_full_optimizer_state(parameter, value.to(parameter.device), key)
