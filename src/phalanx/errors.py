"""Every error that a user can cause.

One tree, mapped to an exit code at one place (the command's `main`). A message says what was wrong
(the value), what was expected, and what to change.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class PhalanxError(Exception):
    """Base of all errors that are the user's to correct. Exit code 2 at the command."""

    exit_code = 2


class ConfigError(PhalanxError):
    """A setting is unknown, has the wrong type or contradicts another."""


class TopologyError(PhalanxError):
    """The environment's words on rank and world size contradict each other."""


class PlanError(PhalanxError):
    """What was asked for cannot be launched: a missing cell, device, port or script."""


class SchedulerError(PhalanxError):
    """Slurm refused, or didn't answer; the message has its own words."""


class MissingExtraError(PhalanxError):
    """An optional package is not installed; the message has the pip command."""


class DataError(PhalanxError):
    """A dataset or loader cannot be shared out over the ranks."""


class CheckpointError(PhalanxError):
    """A checkpoint cannot be written, found or loaded."""


class UsageError(PhalanxError):
    """The API or the command line was used in a way that cannot work."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest of `known`, or an empty string."""
    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
