"""How long all-reduces of several sizes take over all ranks: the script of `phalanx allreduce`.

Its records let a report's forecast tell latency from bandwidth.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

import phalanx
from phalanx.errors import PlanError, UsageError
from phalanx.records import AllReduce

SMALLEST = 1 << 10  # bytes
SECONDS = 0.5  # for each size, about
_MOST, _LEAST = 200, 5  # repeats
_LONG = 0.005  # seconds that a repeat should last: quick ones are timed several at a time, as training starts them


def sizes(most: int) -> Iterator[int]:
    """1 KiB, 4 KiB, … up to `most` bytes."""
    size = SMALLEST
    while size <= most:
        yield size
        size *= 4


def measure(run: phalanx.Run, size: int) -> AllReduce:
    """The median over repeats of the slowest rank's time for one."""
    tensor = torch.zeros(size // 4, device=run.device)
    _check(run, tensor)
    first = min(_times(run, tensor, 1) for _ in range(2))
    number = int(run.broadcast(max(1, round(_LONG / first))))
    repeats = int(run.broadcast(max(_LEAST, min(_MOST, int(SECONDS / first / number)))))
    times = torch.tensor([_times(run, tensor, number) for _ in range(repeats)], dtype=torch.float64)
    slowest = run.reduce(times, op="max").tolist()
    return AllReduce(bytes=size, seconds=statistics.median(slowest), repeats=repeats, backend=_backend(run))


def _check(run: phalanx.Run, tensor: torch.Tensor) -> None:
    """Of links that lose or change data, times mean nothing. The first call also connects."""
    dist.all_reduce(tensor.fill_(1))
    low, high = tensor.min().item(), tensor.max().item()
    if (low, high) != (run.world_size, run.world_size):
        raise PlanError(
            f"an all-reduce of ones over {run.world_size} ranks gave {low:g} to {high:g}: the collective library or a "
            "link is broken"
        )
    tensor.zero_()


def _backend(run: phalanx.Run) -> str:
    """What serves the device, of a group that has several: `nccl`."""
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD._get_backend(run.device).name())


def _times(run: phalanx.Run, tensor: torch.Tensor, number: int) -> float:
    """Seconds for one of `number` all-reduces, one after the other."""
    _settle(run)
    dist.barrier()
    _settle(run)
    begin = time.perf_counter()
    for _ in range(number):
        dist.all_reduce(tensor)
    _settle(run)
    return (time.perf_counter() - begin) / number


def _settle(run: phalanx.Run) -> None:
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)


def main(most_mib: int) -> None:
    with phalanx.init() as run:
        if run.world_size < 2 or not dist.is_initialized():
            raise UsageError(
                f"an all-reduce needs 2 ranks at least, and here is {run.world_size}: phalanx allreduce --nproc 2"
            )
        run.print(f"{'bytes':>12}  {'time':>11}  {'bus bandwidth':>14}")
        share = 2 * (run.world_size - 1) / run.world_size
        for size in sizes(most_mib << 20):
            row = measure(run, size)
            if run.is_main:
                run._session.writer.write(row)
            run.print(f"{size:>12,}  {row.seconds * 1e6:>8,.0f} us  {share * size / row.seconds / 1e9:>9.3f} GB/s")
        run.print(f"for a report: phalanx report YOUR_RUNS {run.run_dir}")


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
