"""Scripts written for Horovod and DeepSpeed, without the API, as jobs on two nodes."""

from __future__ import annotations

import pytest

from tests.dist.engines import needs
from tests.e2e.test_foreign_engines import DEEPSPEED, HOROVOD, WEIGHT, answer

from .conftest import User

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), *needs("horovod"), *needs("deepspeed")]
SIZE = ("-N", "2", "--nproc", "2", "--cpus-per-task", "2")


def test_scripts_written_for_an_engine_train_over_two_nodes(user: User) -> None:
    """Horovod under srun, where nobody but the rank's entry tells it of the others; DeepSpeed by its own launcher."""
    job = user.submit(*SIZE, "-s", "horovod", "--launcher", "srun", "name=hvd", HOROVOD)
    other = user.submit(*SIZE, "-s", "deepspeed", "--launcher", "deepspeed", "name=ds", DEEPSPEED, "--steps", "2")
    assert user.cluster.wait(job, timeout=400)["JobState"] == "COMPLETED", user.output("hvd")
    said = answer(user.output("hvd"))
    assert said["weights"] == [pytest.approx(WEIGHT)] * 4
    # Rank, local rank and size, and the node's number and the number of nodes.
    assert said["places"] == [[0, 0, 2, 0, 2], [1, 1, 2, 0, 2], [2, 0, 2, 1, 2], [3, 1, 2, 1, 2]]

    assert user.cluster.wait(other, timeout=400)["JobState"] == "COMPLETED", user.output("ds")
    said = answer(user.output("ds"))
    assert said["ranks"] == [[rank % 2, rank % 2, pytest.approx(WEIGHT)] for rank in range(4)]
