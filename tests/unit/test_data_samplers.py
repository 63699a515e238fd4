"""Samplers of the user's own: hidden generators, endless ones, batches of different sizes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from torch.utils.data import DataLoader, Sampler

from phalanx.data import prepare_loader
from tests.unit.data_world import Alone, flat, in_ranks

SIZE = 12


class Shuffled(Sampler):
    """A shuffle by a generator that only the sampler knows."""

    def __init__(self, make, endless=False, batch=0, size=SIZE):
        self.rng, self.endless, self.batch, self.size = make(), endless, batch, size

    def __len__(self):
        return -(-self.size // self.batch) if self.batch else self.size

    def _once(self):
        order = list(range(self.size))
        self.rng.shuffle(order)
        if not self.batch:
            return order
        return [order[i : i + self.batch] for i in range(0, self.size, self.batch)]

    def __iter__(self):
        yield from self._once()
        while self.endless:
            yield from self._once()


HIDDEN = [random.Random, lambda: random.Random(0), np.random.default_rng, lambda: np.random.default_rng(0)]


def loader_with(make, endless, batch):
    sampler = Shuffled(make, endless, batch)
    return DataLoader(range(SIZE), **({"batch_sampler": sampler} if batch else {"batch_size": 2, "sampler": sampler}))


def trained(loader, passes, stop=None):
    """[(pass, units)] of groups; `stop` ends it after so many groups."""
    seen = []
    for _ in range(passes):
        for group in loader.groups(1, train=True):
            for micro in group.micros:
                seen.append(micro.batch.tolist() if micro.local else [])
            loader.commit(group)
            if len(seen) == stop:
                return seen
    return seen


@pytest.mark.parametrize("batch", [0, 5])
@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("make", HIDDEN, ids=range(4))
def test_all_ranks_have_rank_0s_order(make, endless, batch):
    """Each rank makes a sampler of its own, as scripts do; each sample is seen once a pass."""

    def rank(peers):
        loader = prepare_loader(loader_with(make, endless, batch), peers, 0, None, True)
        return trained(loader, 2), len(loader)

    ranks = in_ranks(3, rank)
    assert {length for _, length in ranks} == {1 if batch else 2}
    for number in range(2):
        seen = [i for rows, _ in ranks for batch_ in rows[number * ranks[0][1] :][: ranks[0][1]] for i in batch_]
        assert sorted(seen) == list(range(SIZE))


@pytest.mark.parametrize("endless", [False, True])
def test_passes_follow_the_samplers_own_sequence(endless):
    """Python's own shuffles from seed 0, one a pass."""
    rng, expected = random.Random(0), []
    for _ in range(3):
        order = list(range(SIZE))
        rng.shuffle(order)
        expected += order
    loader = prepare_loader(loader_with(lambda: random.Random(0), endless, 0), Alone(), 0, None, True)
    assert flat(trained(loader, 3)) == expected


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("make", "seeded"), [(HIDDEN[0], False), (HIDDEN[1], True), (HIDDEN[3], True)], ids="usn")
def test_a_resumed_pass_has_its_own_order(make, seeded, world):
    """Saved on one rank in pass 1, with an evaluation between; what follows is as in the whole run."""

    def fresh(peers):
        return prepare_loader(loader_with(make, True, 0), peers, 0, None, True)

    whole = fresh(Alone())
    first = trained(whole, 1)
    list(whole.groups(1, train=False))
    first += trained(whole, 1, stop=2)
    state = whole.state_dict()
    second = flat(first[6:])
    if seeded:
        reference = fresh(Alone())
        assert trained(reference, 1) == first[:6]
        list(reference.groups(1, train=False))
        expected = trained(reference, 2)

    def rank(peers):
        loader = fresh(peers)
        loader.load_state_dict(state)
        return trained(loader, 2)

    ranks = in_ranks(world, rank)
    merged = [i for rows in zip(*ranks, strict=True) for part in rows for i in part]
    rest = SIZE - len(second)
    assert sorted(second + merged[:rest]) == list(range(SIZE))
    assert sorted(merged[rest:]) == list(range(SIZE))
    if seeded:
        assert second + merged == flat(expected)


def test_a_sampler_that_has_more_than_it_says_gives_all():
    class Short(Sampler):
        def __len__(self):
            return 4

        def __iter__(self):
            return iter(range(6))

    loader = prepare_loader(DataLoader(range(6), 1, sampler=Short()), Alone(), 0, None, True)
    assert flat(trained(loader, 1)) == list(range(6))


def test_an_error_in_a_sampler_reaches_all_ranks():
    class Broken(Sampler):
        def __len__(self):
            return 4

        def __iter__(self):
            raise ValueError("no weights")

    def rank(peers):
        loader = prepare_loader(DataLoader(range(6), 1, sampler=Broken()), peers, 0, None, True)
        with pytest.raises(ValueError, match="no weights"):
            list(loader.groups(1, train=True))

    in_ranks(2, rank)
