"""Settings of the engines that other projects bring: DeepSpeed and Horovod."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from .section import Section


class DeepspeedSettings(Section):
    zero_stage: Annotated[int, Field(ge=0, le=3)] = Field(
        default=2,
        description="ZeRO: what is sharded over ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too",
    )
    offload: Literal["none", "cpu"] = Field(
        default="none",
        description="ZeRO: where optimizer state (at stage 3 weights too) is kept: none (device), cpu",
    )
    config: str | None = Field(
        default=None,
        description="DeepSpeed's JSON file, for all that has no setting here; what the run decides (batch size, "
        "accumulation, precision, clipping, optimizer) must be absent there, auto, or the same",
    )

    @field_validator("offload", mode="before")
    @classmethod
    def _no_nvme(cls, value: object) -> object:
        if value == "nvme":
            raise ValueError("NVMe offload isn't supported: use cpu or none")
        return value


class HorovodSettings(Section):
    fp16_allreduce: bool = Field(default=False, description="Horovod: gradients travel as fp16")
    use_adasum: bool = Field(default=False, description="Horovod: Adasum in place of the average (needs MPI)")
    gradient_predivide_factor: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Horovod: divide gradients by this before the sum, by the rest of the average after it"
    )
