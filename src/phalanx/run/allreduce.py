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
from phalanx.errors import UsageError
from phalanx.records import AllReduce

SMALLEST = 1 << 10  # bytes
SECONDS = 0.5  # for each size, about
_MOST, _LEAST = 200, 5  # repeats


def sizes(most: int) -> Iterator[int]:
    """1 KiB, 4 KiB, … up to `most` bytes."""
    size = SMALLEST
    while size <= most:
        yield size
        size *= 4


def measure(run: phalanx.Run, size: int) -> AllReduce:
    """The median over repeats of the slowest rank's time."""
    tensor = torch.zeros(size // 4, device=run.device)
    first = max(_once(run, tensor) for _ in range(2))
    repeats = int(run.broadcast(max(_LEAST, min(_MOST, int(SECONDS / first)))))
    times = torch.tensor([_once(run, tensor) for _ in range(repeats)])
    slowest = run.reduce(times, op="max").tolist()
    return AllReduce(bytes=size, seconds=statistics.median(slowest), repeats=repeats, backend=dist.get_backend())


def _once(run: phalanx.Run, tensor: torch.Tensor) -> float:
    _settle(run)
    dist.barrier()
    _settle(run)
    begin = time.perf_counter()
    dist.all_reduce(tensor)
    _settle(run)
    return time.perf_counter() - begin


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
    main(int(sys.argv[1]))
