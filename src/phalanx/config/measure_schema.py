"""Settings of what is measured beside the training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .section import NotNegative, Section


class MeasureSettings(Section):
    profile_steps: NotNegative = Field(
        default=0, description="steps of a profiled window, which tells compute from communication; 0: none"
    )
    profile_start: NotNegative = Field(default=10, description="steps before the profiled window begins")
    gpu_interval: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=1.0, description="seconds between looks at the GPU's use, memory and energy (extra nvml); 0: none"
    )
