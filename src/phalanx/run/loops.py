"""What of an epoch is done already when a run resumes inside it.

The script's epoch begins anew, so its `steps` loops that were over give nothing, the one that was broken
off goes on, and scheduler steps taken between loops are not taken again.
"""

from __future__ import annotations

from typing import Any

from ..errors import CheckpointError


class Turns:
    """One scheduler's steps outside of `steps` loops, in the epoch in hand."""

    def __init__(self) -> None:
        self.taken = 0
        self.repeats = 0  # how many of those to come were taken before the resume

    def again(self) -> bool:
        """Whether the step that the script is about to take was taken before the resume."""
        if self.repeats:
            self.repeats -= 1
            return True
        self.taken += 1
        return False

    def start(self, taken: int) -> None:
        self.taken = self.repeats = taken


class Loops:
    """The `steps` loops of the epoch in hand. Loaders are known by their numbers."""

    def __init__(self) -> None:
        self.turns: list[Turns] = []
        self._over: list[int] = []
        self._open: int | None = None
        self._repeat: list[int] = []  # loops to come that were over before the resume
        self._broken_off: int | None = None  # the loop to come that was not
        self._before: int | None = None  # loops in the epoch before
        self._loaded: dict[str, Any] | None = None

    def scheduler(self) -> Turns:
        self.turns.append(Turns())
        return self.turns[-1]

    def begin_epoch(self, epoch: int) -> None:
        """The script's body of an epoch begins: after a resume, perhaps for the second time."""
        state, self._loaded = self._loaded, None
        if state and state["epoch"] != epoch:  # the script resumed inside another epoch's body
            state = None
        self._over, self._open = [], None
        self._repeat = list(state["over"]) if state else []
        self._broken_off = state["open"] if state else None
        taken = state["schedulers"] if state else [0] * len(self.turns)
        for turns, count in zip(self.turns, taken, strict=False):
            turns.start(count)

    def end_epoch(self) -> None:
        """Nothing of it will be repeated."""
        self._before = len(self._over)
        self._over, self._open = [], None
        for turns in self.turns:
            turns.start(0)

    def repeated(self, loader: int, epoch: int) -> bool:
        """Whether the loop that is about to begin was over before the resume."""
        expected = self._repeat[0] if self._repeat else self._broken_off
        if expected is not None and expected != loader:
            raise CheckpointError(
                f"the checkpoint is from the middle of epoch {epoch}, where loop {len(self._over) + 1} of run.steps() "
                f"was over loader {expected} (in the order of prepare(), from 0), but now it is over loader {loader}: "
                "let the epoch make the same loops again, or resume from a checkpoint of an epoch's end"
            )
        if not self._repeat:
            self._broken_off = None
            return False
        self._over.append(self._repeat.pop(0))
        return True

    def begin(self, loader: int) -> None:
        self._open = loader

    def end(self, over: bool) -> None:
        """The loop has left `steps`; `over` is False where it is to go on after a resume."""
        if self._open is not None and over:
            self._over.append(self._open)
            self._open = None

    def all_done(self, candidates: set[int]) -> bool:
        """Whether the epoch's last loop seems to be over, `candidates` being the loaders that may be trained on."""
        if self._repeat or self._broken_off is not None:
            return False
        if self._before is not None:
            return len(self._over) >= self._before
        return candidates <= set(self._over)

    def state(self, epoch: int) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "over": [*self._over, *self._repeat],
            "open": self._broken_off if self._open is None else self._open,
            "before": self._before,
            "schedulers": [turns.taken for turns in self.turns],
        }

    def load(self, state: dict[str, Any], ended: bool) -> None:
        """For the next epoch that begins: `ended` says whether the checkpoint's own was over."""
        self._before = len(state["over"]) if ended else state["before"]
        self._loaded = None if ended else state
