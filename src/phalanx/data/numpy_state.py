"""NumPy's global generator, set aside and put back in microseconds instead of the 75 that reading its state takes.

The functions of `numpy.random` draw from one RandomState, into which another bit generator can be put. That forgets
the second value that `randn` keeps for its next call, so this is set aside too.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

Held = tuple[Any, tuple[int, float]]  # a bit generator, and the RandomState's has_gauss and gauss


class NumpyAside:
    """A context in which `numpy.random` draws from a stream of its own, which goes on at the next entry.

    Seed the stream inside, the first time at least: where it starts is not said. Not to be entered twice at once.
    """

    def __init__(self) -> None:
        self._inner: Any = None
        self._outer: Any = None
        self.fresh = True  # whether NumPy has not been seen yet

    def __enter__(self) -> None:
        numpy = sys.modules.get("numpy")
        if numpy is not None and hasattr(numpy, "random"):  # else it is being imported
            self._outer = _exchange(numpy.random, self._inner)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outer is not None:
            self._inner = _exchange(sys.modules["numpy"].random, self._outer)
            self._outer, self.fresh = None, False


def _exchange(random: Any, new: Any) -> Any:
    """Put `new` in place of what `numpy.random` draws from, and return that."""
    state = random.get_state.__self__
    if not _swaps(random, state):
        old = random.get_state(legacy=False)
        if new is not None:
            random.set_state(new)
        return old
    held: Held = (random.get_bit_generator(), _gauss(state))
    generator, gauss = new or (random.MT19937(0), (0, 0.0))
    random.set_bit_generator(generator)
    if gauss[0]:
        _set_gauss(state, gauss)
    return held


_swappable: bool | None = None


def _swaps(random: Any, state: Any) -> bool:
    """Whether this NumPy lets the bit generator and the kept value be read and replaced."""
    global _swappable
    if _swappable is None:
        try:
            _set_gauss(state, _gauss(state))
            _swappable = random.get_bit_generator() is state._bit_generator and hasattr(random, "set_bit_generator")
        except (AttributeError, TypeError, KeyError, ValueError):
            _swappable = False
    return _swappable


class _NoGenerator:
    """Stands for the bit generator while its RandomState reads or sets its own part of the state."""

    def __init__(self) -> None:
        self.state: Any = {"bit_generator": "MT19937"}


def _gauss(state: Any) -> tuple[int, float]:
    real, state._bit_generator = state._bit_generator, _NoGenerator()
    try:
        whole = state.get_state(legacy=False)
    finally:
        state._bit_generator = real
    return whole["has_gauss"], whole["gauss"]


def _set_gauss(state: Any, gauss: tuple[int, float]) -> None:
    real, state._bit_generator = state._bit_generator, _NoGenerator()
    try:
        state.set_state({"bit_generator": "MT19937", "state": None, "has_gauss": gauss[0], "gauss": gauss[1]})
    finally:
        state._bit_generator = real
