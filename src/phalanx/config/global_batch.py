"""The setting `global_batch`: how the samples of a step are shared out over ranks and micro-batches."""

from __future__ import annotations

from ..errors import ConfigError
from . import JobConfig


def share_batch(config: JobConfig, world_size: int, most: int) -> tuple[int, int]:
    """(samples of a rank's micro-batch, micro-batches a step) for `config.global_batch` samples a step.

    `most` is the loader's batch_size, which a micro-batch doesn't exceed; the fewest micro-batches that do
    are taken, or as many as `accumulate` says if it was set. Raises ConfigError for what doesn't divide.
    """
    each = share_of_rank(config, world_size)
    if "accumulate" in config.model_fields_set:
        return _as_set(config, each, world_size, most), config.accumulate
    steps = next(n for n in range(1, each + 1) if each % n == 0 and each // n <= most)
    return each // steps, steps


def share_of_rank(config: JobConfig, world_size: int) -> int:
    """Samples of each rank in a step. Raises ConfigError if they can't be the same for all."""
    total = config.global_batch
    assert total is not None
    each, rest = divmod(total, world_size)
    if rest:
        near = [n for n in (total - rest, total - rest + world_size) if n]
        ranks = [n for n in (_divisor(total, world_size, -1), _divisor(total, world_size, 1)) if n]
        raise ConfigError(
            f"global_batch={total} can't be shared evenly by {world_size} ranks: set global_batch to "
            f"{' or '.join(map(str, near))}, or start {' or '.join(map(str, ranks))} ranks"
        )
    return each


def _divisor(total: int, start: int, by: int) -> int:
    """The divisor of `total` that is nearest to `start` in one direction; 0 if there is none."""
    number = start + by
    while 0 < number <= total and total % number:
        number += by
    return number if 0 < number <= total else 0


def _as_set(config: JobConfig, each: int, world_size: int, most: int) -> int:
    micro, rest = divmod(each, config.accumulate)
    if not rest and micro <= most:
        return micro
    fitting = [n for n in range(1, each + 1) if each % n == 0 and each // n <= most]
    nearest = sorted(sorted(fitting, key=lambda n: abs(n - config.accumulate))[:2])
    why = (
        f"{each} doesn't divide by it" if rest else f"micro-batches of {micro} exceed the loader's batch_size of {most}"
    )
    raise ConfigError(
        f"global_batch={config.global_batch} over {world_size} ranks is {each} samples a rank, which accumulate="
        f"{config.accumulate} doesn't fit: {why}; leave accumulate out, or set it to {' or '.join(map(str, nearest))}"
    )
