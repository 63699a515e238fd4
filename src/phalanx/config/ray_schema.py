"""Settings of the launcher ray."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .section import Positive, Section


class RaySettings(Section):
    start_timeout: Positive = Field(
        default=120, description="seconds for Ray's head to come up and for all nodes to join it"
    )
    object_store_memory: Annotated[int, Field(ge=75)] = Field(
        default=100, description="MiB of shared memory that Ray takes on each node (training data don't go through it)"
    )
    temp_dir: str | None = Field(
        default=None, description="folder for Ray's sockets and logs on each node; unset: TMPDIR, else /tmp"
    )
