"""A prepared model as those see it who save it, show it or name its parts: under the names that it has
without torch.compile.

`block = torch.compile(block)` puts a module around the block, and `_orig_mod` into its names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from .base import Strategy

HELD_AS = "_orig_mod"  # by what torch.compile has made around a module


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has made it around another module."""
    # By names, as the import of torch._dynamo takes a second. FSDP makes subclasses.
    kinds = ((kind.__name__, kind.__module__.partition(".")[0]) for kind in type(module).__mro__)
    return ("OptimizedModule", "torch") in kinds


class Names:
    """The names of a model's parts, without what torch.compile has put into them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._compiled: set[str] | None = None  # where compiled modules are, by torch's names

    def plain(self, name: str) -> str:
        """`0.weight` of `0._orig_mod.weight`. A module of the script's may have that name too, and keeps it."""
        if HELD_AS not in name:  # as good as always
            return name
        if self._compiled is None:
            modules = self._model.named_modules(remove_duplicate=False)
            self._compiled = {path for path, module in modules if is_compiled(module)}
        parts = name.split(".")
        paths = (".".join(parts[:at]) for at in range(len(parts)))
        kept = [part for path, part in zip(paths, parts, strict=True) if part != HELD_AS or path not in self._compiled]
        return ".".join(kept)

    def of(self, named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Pairs of a name and a part, under plain names."""
        for name, part in named:
            yield self.plain(name), part


def named_parameters(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Those of a module of the user's, under plain names."""
    return Names(model).of(model.named_parameters(remove_duplicate=remove_duplicate))


class SavedModel:
    """What has the state_dict and load_state_dict of the user's model, and the parameters that optimizers hold.

    `source` has them under torch's names, if it is not the module itself.
    """

    def __init__(self, strategy: Strategy, module: nn.Module, source: Any = None) -> None:
        self._strategy = strategy
        self._module = module
        self._source = module if source is None else source
        self._names = Names(module)

    def modules(self) -> Iterator[nn.Module]:
        return self._module.modules()

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return self._names.of(self._module.named_modules())

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        return self._strategy.held(self._module, remove_duplicate)

    def named_buffers(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        return self._names.of(self._module.named_buffers(remove_duplicate=remove_duplicate))

    def state_dict(self) -> dict[str, Any]:
        return dict(self._names.of(self._source.state_dict().items()))

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        here = {self._names.plain(name): name for name in self._module.state_dict()}
        self._source.load_state_dict({here.get(name, name): value for name, value in values.items()})
