"""`python -m phalanx.ray_launch.driver JSON`, on the first node: Ray Train with a worker for each rank.

What Ray says goes to the log; what the user must know to stderr. The exit code is the failed rank's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import PhalanxError, PlanError
from .node import RANKS, joined
from .rank import RankFailed, run_rank


@dataclass(frozen=True)
class Order:
    """What the agent asks of its driver; `limit` in seconds from now, `start_timeout` as it was set."""

    address: str
    hosts: Sequence[str]
    nproc: int
    words: Sequence[str]
    log: str
    storage: str
    limit: float
    start_timeout: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main(arguments: list[str]) -> int:
    order = Order(**json.loads(arguments[0]))
    terminal = os.fdopen(os.dup(2), "w")
    log = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        limit = time.monotonic() + order.limit
        _connect(order, limit)
        return _train(order, _wait_for_nodes(order, limit))
    except PhalanxError as error:
        print(f"phalanx: {error}", file=terminal)
        return error.exit_code
    except Exception as error:
        import traceback

        traceback.print_exc()
        print(f"phalanx: Ray failed: {_last_line(error)}; its words: {order.log}", file=terminal)
        return 1


def _connect(order: Order, limit: float) -> None:
    """To the head, whose first process may be up before its last."""
    import ray

    while True:
        try:
            ray.init(address=order.address, log_to_driver=False)
            return
        except (ConnectionError, RuntimeError):
            if time.monotonic() > limit:
                raise
        time.sleep(0.2)


def _wait_for_nodes(order: Order, limit: float) -> list[dict[str, float]]:
    """The resources of all nodes, once all have joined.

    Raises PlanError with the names of those that haven't in time.
    """
    import ray

    while True:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        missing = absent(order.hosts, nodes)
        if not missing:
            return nodes
        if time.monotonic() > limit:
            raise PlanError(
                f"{', '.join(missing)} did not join the Ray head on {order.hosts[0]} within {order.start_timeout} s: "
                f"see what those nodes said, above and in {Path(order.log).parent}; more time: ray.start_timeout"
            )
        time.sleep(0.1)


def absent(hosts: Sequence[str], nodes: Iterable[dict[str, float]]) -> list[str]:
    """The hosts that are none of the `nodes`, told by their resources."""
    there = {name for resources in nodes for name in resources}
    return [host for index, host in enumerate(hosts) if joined(index) not in there]


def shares(nodes: Sequence[dict[str, float]], nproc: int) -> dict[str, float]:
    """What each worker takes: the same on all nodes, so that each node holds its `nproc` and no more."""
    cpus = min(resources.get("CPU", 0) for resources in nodes)
    gpus = min(resources.get("GPU", 0) for resources in nodes)
    # Ray takes whole numbers, or parts of one in ten-thousandths.
    cpu = cpus // nproc if cpus >= nproc else int(cpus * 10000 / nproc) / 10000
    return {RANKS: 1, "CPU": cpu} | ({"GPU": gpus // nproc} if gpus >= nproc else {})


def _train(order: Order, nodes: Sequence[dict[str, float]]) -> int:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.train.v2.api.exceptions import WorkerGroupError

    each = shares(nodes, order.nproc)
    trainer = DataParallelTrainer(
        run_rank,
        train_loop_config={"words": list(order.words)},
        scaling_config=ScalingConfig(
            num_workers=len(order.hosts) * order.nproc,
            use_gpu="GPU" in each,
            resources_per_worker=each,
            placement_strategy="PACK",
        ),
        run_config=RunConfig(name="train", storage_path=order.storage),
    )
    try:
        trainer.fit()
    except WorkerGroupError as error:
        code = failed_with(error.worker_failures.values())
        if code is None:
            raise
        return code
    return 0


def failed_with(failures: Iterable[Any]) -> int | None:
    """The exit code of a rank that failed, as a shell shows it; None if what failed was no rank but Ray."""
    causes = [getattr(failure, "_base_exc", failure) for failure in failures]
    codes = [cause.code for cause in causes if isinstance(cause, RankFailed)]
    # One that left by itself comes before those which that ended.
    return next((code if code > 0 else 128 - code for code in sorted(codes, reverse=True)), None)


def _last_line(error: Exception) -> str:
    """Ray adds advice to what happened."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].partition(" Some common causes")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
