"""Virtual environments of jobs: built on the nodes that will use them, offline too, and checked at submission."""

from .record import environment_warnings

__all__ = ["environment_warnings"]
