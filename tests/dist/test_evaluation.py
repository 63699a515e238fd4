"""Evaluations whose batches are no tensors, of which ranks have unequally many, or that end in any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import phalanx
from phalanx.errors import DataError, UsageError
from tests.dist.engines import environ_for, needs
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow


class Images(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Tensor, dict[str, Any]]:
        return torch.full((3, 4 + i, 5), float(i)), {"boxes": torch.ones(i % 3, 4), "id": i}


class Graphs:
    """A batch of a class of one's own."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples


class Net(nn.Module):
    """Has buffers, which ddp sends before a forward; takes lists of images of different sizes, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)

    def forward(self, images: Any) -> Tensor:
        rows = [image.mean(dim=(1, 2)) for image in images]
        return self.head(self.norm(torch.stack(rows) if rows else torch.zeros(0, 3)))


def _fields(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def evaluations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with phalanx.init(name="images", progress=False) as run:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train = DataLoader(list(range(8)), 2)
        val = DataLoader(Images(5), 1, collate_fn=_fields)
        graphs, even = (DataLoader(Images(n), 1, collate_fn=Graphs) for n in (5, 6))
        model, optimizer, train, val, graphs, even = run.prepare(model, optimizer, train, val, graphs, even)
        found["seen"] = []
        for images, targets in run.evaluate(val):
            model(images)
            found["seen"] += [target["id"] for target in targets]
        found["total"] = run.reduce(float(len(found["seen"])), "sum")
        with pytest.raises(DataError, match=r"rank 1 runs out.*even=False"):
            next(run.evaluate(graphs))
        for loader, name in ((graphs, "own"), (even, "equal")):
            try:
                own = []
                for batch in run.evaluate(loader, even=False):
                    model([image for image, _ in batch.samples])
                    own += [target["id"] for _, target in batch.samples]
                found[name] = own
            except UsageError as error:
                found[name] = str(error)
        found["grad"] = torch.is_grad_enabled(), model.training
    return found


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=needs(name)) for name in ("ddp", "fsdp", "deepspeed-3", "horovod")],
)
def test_images_and_graphs_over_two_ranks(tmp_path: Path, strategy: str) -> None:
    """5 items: each counts once, though one rank has one more; 6 are 3 for each rank."""
    ranks = run_ranks(evaluations, 2, folder=tmp_path, env=environ_for(strategy, 2))
    assert [rank["seen"] for rank in ranks] == [[0, 2, 4], [1, 3]]
    assert [rank["equal"] for rank in ranks] == [[0, 2, 4], [1, 3, 5]]
    assert [rank["total"] for rank in ranks] == [5.0, 5.0]
    assert [rank["grad"] for rank in ranks] == [(True, True)] * 2
    if strategy in ("ddp", "horovod"):
        assert [rank["own"] for rank in ranks] == [[0, 2, 4], [1, 3]]
    else:
        assert all("different numbers of batches" in rank["own"] for rank in ranks)


def any_order() -> list[tuple[str, bool, bool]]:
    found = []
    with phalanx.init(name="order", progress=False) as run:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        a, b = (DataLoader(torch.ones(n, 1), 1) for n in (4, 2))
        model, _, a, b = run.prepare(model, optimizer, a, b)

        def note(name: str) -> None:
            found.append((name, torch.is_grad_enabled(), model.training))

        for _ in zip(run.evaluate(a), run.evaluate(b), strict=False):
            assert not torch.is_grad_enabled()
        note("zip")
        for _ in zip(run.evaluate(b), run.evaluate(a), strict=False):
            assert not torch.is_grad_enabled()
        note("zip, the shorter first")
        for _x in run.evaluate(a):
            for _y in run.evaluate(b):
                assert not torch.is_grad_enabled()
            assert not torch.is_grad_enabled()
            assert not model.training
        note("nested")
        one, two = run.evaluate(a), run.evaluate(b)
        next(one), next(two)
        one.close()
        assert not torch.is_grad_enabled()
        with pytest.raises(UsageError, match="before an evaluate"):
            next(run.steps(a))
        two.close()
        note("broken off, the first first")
        with torch.no_grad():
            list(run.evaluate(a))
            assert not torch.is_grad_enabled()
        note("inside no_grad")
        model.eval()
        list(run.evaluate(a))
        note("in eval mode already")
    return found


def test_evaluations_end_in_any_order(tmp_path: Path) -> None:
    (found,) = run_ranks(any_order, 1, folder=tmp_path)
    assert [flags for _, *flags in found] == [[True, True]] * 5 + [[True, False]], found
