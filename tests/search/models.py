"""Models, data, losses and optimizers of a case, for the script under test and the loop by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler

from tests.search.cases import STREAMS, UNITS, Case

WIDE = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.linear(h))


class Net(nn.Module):
    """A few layers, and what `parts` adds. `counting` is off where a buffer is another rank's."""

    def __init__(self, parts: Sequence[str]) -> None:
        super().__init__()
        self.parts, self.counting = parts, True
        self.inlet, self.outlet = nn.Linear(4, WIDE), nn.Linear(WIDE, 1)
        if "blocks" in parts or "tied blocks" in parts:
            self.blocks = nn.ModuleList(Block() for _ in range(2))
        if "tied blocks" in parts:
            self.blocks[1].linear.weight = self.blocks[0].linear.weight
        if "tied" in parts:
            self.there, self.back = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
            self.back.weight = self.there.weight
        if "shared" in parts:
            self.twice = Block()
        if "frozen" in parts:
            self.inlet.requires_grad_(False)
        if "conditional" in parts:
            self.extra = nn.Linear(WIDE, WIDE)
        if "scalar" in parts:
            self.gain = nn.Parameter(torch.tensor(0.5))
        if "double" in parts:
            self.exactly = nn.Linear(WIDE, WIDE, dtype=torch.float64)
        if "buffers" in parts:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.register_buffer("seen", torch.zeros(WIDE))
            self.register_buffer("mask", torch.tensor([True, False] * (WIDE // 2)))

    def forward(self, x: Tensor | list[Tensor]) -> Tensor:
        if isinstance(x, list):  # of images, each of its own size
            x = torch.stack([image.mean(0) for image in x]) if x else torch.zeros(0, 4)
        h = torch.tanh(self.inlet(x))
        if hasattr(self, "blocks"):
            for block in self.blocks:
                h = block(h)
        if "tied" in self.parts:
            h = h + self.back(torch.tanh(self.there(h)))
        if "shared" in self.parts:
            h = self.twice(self.twice(h))
        if "conditional" in self.parts and (not self.training or bool((x[:, 0] > 0.5).any())):
            h = h + torch.tanh(self.extra(h))
        if "scalar" in self.parts:
            h = h * self.gain
        if "double" in self.parts:
            h = h + self.exactly(h.double()).to(h.dtype)
        return self.outlet(self._watched(h) if "buffers" in self.parts else h)

    def _watched(self, h: Tensor) -> Tensor:
        """Like a batch norm: rank 0's average of what it saw, used in eval mode."""
        if self.training and self.counting:
            self.calls += 1
            self.seen.mul_(0.5).add_(h.detach().float().mean(0), alpha=0.5)
        return h if self.training else h - self.seen * self.mask


class Linear(nn.Linear):
    """The mean of its output has the mean of its input for a gradient."""

    def __init__(self, start: float) -> None:
        super().__init__(4, 1, bias=False)
        nn.init.constant_(self.weight, start)


def build(case: Case, rank: int) -> list[nn.Module]:
    """The models; other ranks' begin elsewhere, since `prepare` is to give them rank 0's."""
    with torch.random.fork_rng():
        torch.manual_seed(1000 * case.seed + rank)
        if case.exact:
            return [Linear(float(rank))]
        return [Net(case.parts)] + ([Net(())] if case.second == "model" else [])


def optimizers(case: Case, models: list[nn.Module]) -> list[torch.optim.Optimizer]:
    """One for each model, or one for each half of the only one."""
    trained = [[p for p in model.parameters() if p.requires_grad] for model in models]
    if case.second == "half":
        trained = [trained[0][::2], trained[0][1::2]]
    return [_optimizer(case, parameters) for parameters in trained]


def _optimizer(case: Case, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups: Any = parameters
    if case.groups == "two":
        groups = [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:]}]
    elif case.groups == "empty":
        groups = [{"params": parameters}, {"params": [], "weight_decay": 0.0}]
    if case.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1, eps=1e-2)
    if case.optimizer == "adagrad":
        return torch.optim.Adagrad(groups, lr=0.02, eps=1e-2)
    rate = 0.25 if case.exact else 0.1
    return torch.optim.SGD(groups, lr=rate, momentum=0.5 if case.optimizer == "momentum" else 0.0)


def pairs(case: Case, nets: list[nn.Module]) -> list[tuple[nn.Module, list[int]]]:
    """Each model with the numbers of its optimizers, in the order of training."""
    return [(net, [0, 1] if case.second == "half" else [at]) for at, net in enumerate(nets)]


def schedulers(case: Case, steppers: list[torch.optim.Optimizer]) -> list[Any]:
    return [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.7) for one in steppers] if case.scheduler else []


def loss_of(case: Case, out: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """The mean over samples, or over their tokens."""
    each = out if case.exact else (out - y) ** 2
    return (each * w).sum() / w.sum() if case.weighted else each.mean()


# Data.


def rows(case: Case, ids: Sequence[int]) -> tuple[Any, Tensor, Tensor]:
    """Inputs, targets and token counts of samples; of `images`, a list of inputs."""
    numbers = torch.tensor([float(i) for i in ids]).reshape(-1, 1)
    y, w = torch.sin(3 * numbers), 1 + numbers % 3
    if case.exact:  # sums of neighbours have more digits than bf16
        return 2.0 ** -((11 * numbers + 3 * torch.arange(4)) % 14), y, w
    x = torch.sin((numbers + 1) * torch.arange(1.0, 5.0))
    if case.loader == "images":
        return [row + torch.arange(1 + i % 3).reshape(-1, 1) / 8 for row, i in zip(x, ids, strict=True)], y, w
    return x, y, w


def sizes(case: Case, loader: str) -> int:
    """Samples of loader a, b or val; batches, where the loader doesn't make them."""
    return 5 if loader == "val" else case.size + (loader == "b" and case.pair == "then")


def units(case: Case, loader: str) -> list[list[int]]:
    """The batches of a loader that doesn't make them, of sizes of their own."""
    found: list[list[int]] = []
    for number in range(sizes(case, loader)):
        first = found[-1][-1] + 1 if found else 0
        found.append(list(range(first, first + 1 + (2 * number + case.seed) % 4)))
    return found


def numbers(case: Case, loader: str) -> list[int]:
    """The ids of all samples of a loader."""
    if case.loader in UNITS:
        return [i for ids in units(case, loader) for i in ids]
    return list(range(sizes(case, loader)))


def shuffles(case: Case, loader: str) -> bool:
    """Whether the loader has an order of its own in each pass."""
    if case.loader in ("sampler", "hidden"):
        return True
    return loader != "val" and case.loader not in STREAMS and (case.shuffle or (loader, case.pair) == ("b", "zip"))


def drops_last(case: Case, loader: str) -> bool:
    return case.drop_last and loader != "val"


class Samples(Dataset):
    def __init__(self, case: Case, ids: list[int]) -> None:
        self.case, self.ids = case, ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return _sample(self.case, self.ids[index])


class Stream(IterableDataset):
    def __init__(self, case: Case, items: list[Any]) -> None:
        self.case, self.items = case, items

    def __iter__(self) -> Iterator[Any]:
        make = ready if self.case.loader in UNITS else _sample
        return (make(self.case, item) for item in self.items)


def _sample(case: Case, index: int) -> Any:
    x, y, w = rows(case, [index])
    if case.loader == "images":
        return {"image": x[0], "y": y, "w": w, "id": index}
    if case.loader == "dict":
        return {"w": w[0], "x": x[0], "y": y[0], "id": index}
    return x[0], y[0], w[0], index


def ready(case: Case, ids: list[int]) -> dict[str, Tensor]:
    """A batch as a dataset makes it; a graph's first tensor has no row for each sample."""
    x, y, w = rows(case, ids)
    edges = {"edges": torch.zeros(2, 3 * len(ids))} if case.loader == "graph" else {}
    return {**edges, "x": x, "y": y, "w": w, "id": torch.tensor(ids)}


class Hidden:
    """A sampler whose generator nobody sees, and that differs from rank to rank."""

    def __init__(self, size: int) -> None:
        self.size, self.random = size, random.Random()

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(self.size), self.size))


def loader(case: Case, name: str) -> DataLoader[Any]:
    """Loader a, b or val, as the script makes it."""
    ids = numbers(case, name)
    if case.loader == "stream":
        return DataLoader(Stream(case, ids), batch_size=case.batch)
    if case.loader in STREAMS:
        return DataLoader(Stream(case, units(case, name)), batch_size=None)
    data: Any = Samples(case, ids)
    if case.loader == "batches":
        return DataLoader(data, batch_sampler=units(case, name))
    if case.loader in ("sampler", "hidden"):
        own = SubsetRandomSampler(ids, torch.Generator().manual_seed(case.seed))
        return DataLoader(data, case.batch, sampler=Hidden(len(ids)) if case.loader == "hidden" else own)
    more = {"collate_fn": _listed} if case.loader == "images" else {}
    return DataLoader(data, case.batch, shuffles(case, name), drop_last=drops_last(case, name), **more)


def _listed(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {key: [sample[key] for sample in samples] for key in samples[0]}


def parts_of(batch: Any) -> tuple[Any, Tensor, Tensor, list[int]]:
    """Inputs, targets, token counts and ids of a batch of any loader."""
    if isinstance(batch, dict) and "image" in batch:
        empty = torch.zeros(0, 1)
        return batch["image"], torch.cat([empty, *batch["y"]]), torch.cat([empty, *batch["w"]]), list(batch["id"])
    x, y, w, ids = (batch[key] for key in ("x", "y", "w", "id")) if isinstance(batch, dict) else batch
    return x, y, w, ids.tolist()
