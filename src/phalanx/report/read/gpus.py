"""What GPUs did, over all ranks of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...records import Gpu, Record


def utilisation(records: Sequence[Record]) -> float | None:
    """Mean over time and GPUs, in percent."""
    told = [record for record in records if isinstance(record, Gpu) and math.isfinite(record.utilisation)]
    seconds = sum(record.seconds for record in told)
    return sum(record.seconds * record.utilisation for record in told) / seconds if seconds > 0 else None


def energy(records: Sequence[Record]) -> float | None:
    """Joules of all GPUs; None if one of them doesn't tell, since the rest is no run's energy."""
    told = [record.energy for record in records if isinstance(record, Gpu)]
    return sum(told) if told and all(math.isfinite(value) for value in told) else None
