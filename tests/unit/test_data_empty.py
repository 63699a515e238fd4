"""Batches without samples, of many structures, on a rank that runs out in an evaluation."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

from phalanx.data import prepare_loader
from phalanx.data.empty import emptied, weigh
from phalanx.errors import DataError
from tests.unit.data_world import Alone, in_ranks

Pair = namedtuple("Pair", "images targets")


@dataclass
class Boxes:
    images: torch.Tensor
    names: list


class Graph:
    def __init__(self, nodes):
        self.nodes = nodes


class Images(Dataset):
    """Sample i is an image of its own size with i % 3 boxes, and a draw."""

    def __init__(self, size=5):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return torch.ones(3, 4 + i, 5), {"boxes": torch.ones(i % 3, 4), "id": i}, torch.rand(1)


def ids(batch):
    return [int(target["id"]) for target in batch]


def images(samples):
    return [sample[0] for sample in samples]


def targets(samples):
    return [sample[1] for sample in samples]


def fields(samples):
    return tuple(zip(*samples, strict=True))


def dict_of_lists(samples):
    return {"images": images(samples), "targets": targets(samples), "classes": 3}


def pairs(samples):
    return [(image, target) for image, target, _ in samples]


def named(samples):
    return Pair(images(samples), targets(samples))


def in_class(samples):
    return Boxes(torch.ones(len(samples), 2), [f"image {i}" for i in ids(targets(samples))])


def joined(samples):
    """As for graphs without a library: all boxes one below the other, where each image's begin, and how many images."""
    boxes = torch.cat([torch.ones(2, 4) for _ in samples])
    begins = torch.arange(0, 2 * len(samples) + 1, 2)
    return {"boxes": boxes, "begins": begins, "images": len(samples), "edges": torch.ones(2, 3 * len(samples))}


def time_first(samples):
    return pad_sequence([torch.ones(4, 2) for _ in samples]), torch.tensor(len(samples))


EMPTY = [
    (fields, lambda b: b == ((), (), ())),
    (dict_of_lists, lambda b: b == {"images": [], "targets": [], "classes": 3}),
    (targets, lambda b: b == []),
    (pairs, lambda b: b == []),
    (named, lambda b: b == Pair([], [])),
    (in_class, lambda b: b.images.shape == (0, 2) and b.names == []),
    (
        joined,
        lambda b: (
            b["boxes"].shape == (0, 4)
            and b["begins"].tolist() == [0]
            and b["images"] == 0
            and b["edges"].shape == (2, 0)
        ),
    ),
    (time_first, lambda b: b[0].shape == (4, 0, 2) and b[1].item() == 0),
]


def evaluated(loader, rank, world, peers=None):
    prepared = prepare_loader(loader, peers or Alone(rank, world), 0, None, False)
    return [micro for group in prepared.groups(1, train=False) for micro in group.micros]


@pytest.mark.parametrize(("collate", "empty"), EMPTY, ids=lambda part: getattr(part, "__name__", ""))
def test_a_rank_without_data_gets_no_items_of_any_structure(collate, empty):
    """5 samples, one a batch, over 2 ranks and over 8: the ranks behind get nothing in the last batch."""
    loader = DataLoader(Images(), 1, collate_fn=collate)
    for world in (2, 8):
        micros = in_ranks(world, lambda peers, w=world: evaluated(loader, peers.rank, w, peers))
        last = [of_rank[-1] for of_rank in micros]
        assert [micro.local for micro in last] == [1] * (5 % world or world) + [0] * (world - 5 % world)
        assert all(empty(micro.batch) for micro in last if not micro.local)
        assert not any(empty(micro.batch) for micro in last if micro.local)


@pytest.mark.parametrize("workers", [0, 2])
def test_learning_the_structure_changes_no_sample(workers):
    """The draws of each sample are those of one process; each counts once."""
    loader = DataLoader(Images(), 1, collate_fn=fields, num_workers=workers)
    alone = {ids(m.batch[1])[0]: m.batch[2][0].item() for m in evaluated(loader, 0, 1)}
    found = [
        (i, draw.item())
        for of_rank in in_ranks(2, lambda peers: evaluated(loader, peers.rank, 2, peers))
        for micro in of_rank
        for i, draw in zip(ids(micro.batch[1]), micro.batch[2], strict=True)
    ]
    assert sorted(found) == sorted(alone.items())
    assert len(alone) == 5


@pytest.mark.parametrize(
    "collate",
    [
        lambda b: Graph(len(b)),
        lambda b: {s[1]["id"]: s[0] for s in b},
        lambda b: pack_sequence([torch.ones(2)] * len(b)),
    ],
)
def test_what_cannot_be_empty_is_an_error_on_all_ranks_before_the_first_batch(collate):
    loader = DataLoader(Images(), 1, collate_fn=collate)
    begun = []

    def first(peers):
        with pytest.raises(DataError, match=r"rank 1 runs out of data .*run\.evaluate\(loader, even=False\)"):
            begun.append(evaluated(loader, peers.rank, 2, peers))

    in_ranks(2, first)
    assert begun == []


def test_batches_of_ones_own_only():
    loader = DataLoader(Images(), 1, collate_fn=lambda b: Graph(b[0][1]["id"]))
    prepared = [prepare_loader(loader, Alone(rank, 2), 0, None, False) for rank in range(2)]
    assert [[graph.nodes for graph in one.evaluation(even=False)] for one in prepared] == [[0, 2, 4], [1, 3]]
    assert not prepared[0].even()
    assert prepare_loader(DataLoader(Images(6), 1), Alone(0, 2), 0, None, False).even()


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(4, 2), 4),
        ((torch.ones(4, 2), torch.ones(4)), 4),
        ((torch.ones(2, 3), torch.ones(2, 3)), 2),
        ({"x": torch.ones(4, 2), "names": ["a"] * 4, "scale": torch.tensor(2.0), "size": (3, 8, 8)}, 4),
        (["a", "b"], 2),
        (Pair(torch.ones(5, 2), torch.ones(5)), 5),
    ],
)
def test_sure_numbers_of_samples(batch, samples):
    assert weigh(batch) == (samples, "")


@pytest.mark.parametrize(
    ("batch", "doubt"),
    [
        ({"edge_index": torch.zeros(2, 12), "y": torch.ones(4, 1)}, "first dimensions 2, 4"),
        ([torch.ones(3, 8, 8) for _ in range(4)], "a list of 4 tensors whose first dimension is 3"),
        ([torch.ones(3, 8, 8)], "a list of 1 tensors whose first dimension is 3"),
        ((tuple(torch.ones(3, 8, 8 + i) for i in range(4)), torch.tensor(1)), "a list of 4"),
        (Graph(3), "a batch of Graph"),
    ],
)
def test_doubtful_numbers_of_samples(batch, doubt):
    samples, said = weigh(batch)
    assert samples >= 1
    assert doubt in said


def test_where_nothing_can_be_learnt_only_the_certain_is_emptied():
    """Iterable datasets, whose batches alone are known."""
    assert emptied(fields([(torch.ones(3, 4), {"id": 1})]), 1) == ((), ())
    assert emptied([torch.ones(3, 4)] * 4, 4) == []
    assert emptied({"x": torch.ones(4, 2), "name": "a"}, 4)["x"].shape == (0, 2)
    for batch, samples in [
        (torch.ones(3, 4), 2),
        ([torch.ones(2, 4)] * 2, 2),
        ([[1, 2], [3, 4]], 2),
        (Graph(1), 1),
        ([torch.ones(3, 8)] * 4, None),
    ]:
        with pytest.raises(DataError, match="even=False"):
            emptied(batch, samples)
