"""The run's precision: autocast around a model's forward, by hooks, so that no method is replaced.

(A replaced `forward` would make a deep copy, such as an average of the weights, call the original's.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class AutocastForward:
    """Hooks that run a module's forward under autocast and give float32 results to the loss."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self._device_type = device_type
        self._dtype = dtype
        self._open: list[torch.autocast] = []  # a forward may run inside another

    def attach(self, model: nn.Module) -> None:
        _keep_from_dynamo()
        model.register_forward_pre_hook(self._enter)
        model.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        context = torch.autocast(self._device_type, self._dtype)
        context.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(context)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        self._open.pop().__exit__(None, None, None)
        return tree_map_only(Tensor, self._to_float32, output)

    def _to_float32(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype == self._dtype else tensor


def _keep_from_dynamo() -> None:
    """torch.compile must not trace the hooks: it gets what they do to autocast's state wrong. So compiled code begins
    after the one and ends before the other, inside of autocast."""
    from torch._dynamo.decorators import skip  # a second, unless an optimizer has imported it already

    skip(AutocastForward._enter)
    skip(AutocastForward._leave)
