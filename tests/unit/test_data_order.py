"""The order of a pass and its dealing, against closed forms and sets."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from phalanx.data import prepare_loader
from phalanx.data.order import Deal, epoch_order, take
from phalanx.errors import DataError
from tests.unit.data_world import Alone, in_ranks

sizes = st.integers(0, 60)
worlds = st.integers(1, 5)
widths = st.integers(1, 7)


def ordered(sampler, index=0, seed=1, world=2):
    (order, *_) = in_ranks(world, lambda peers: epoch_order(sampler, seed, peers).make(index))
    return take(order, 0, len(order))


@given(sizes, widths, worlds, st.booleans())
def test_each_unit_is_dealt_once_evenly_and_in_order(size, width, world, drop_last):
    deal = Deal(size, width, world, drop_last)
    step = width * world
    assert deal.batches() == (size // step if drop_last else math.ceil(size / step))
    dealt = []
    for number in range(deal.batches()):
        low, high = number * step, min(size, (number + 1) * step)
        shares = [deal.share(low, high, rank) for rank in range(world)]
        lengths = [b - a for a, b in shares]
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)  # the first ranks get one more
        for a, b in shares:
            dealt += range(a, b)
    assert dealt == list(range(size // step * step if drop_last else size))


def test_shuffles_differ_by_pass_and_seed_and_repeat():
    sampler = RandomSampler(range(50))
    first = ordered(sampler)
    assert sorted(first) == list(range(50))
    assert first == ordered(RandomSampler(range(50)))
    assert len({tuple(ordered(sampler, p, s)) for p in range(3) for s in range(3)}) == 9
    assert ordered(SequentialSampler(range(5)), index=3) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_distributed_sampler_is_not_split_twice(shuffle, drop_last):
    """A user who already shards keeps every sample: the ranks' parts are united, nothing is padded."""
    sampler = DistributedSampler(range(11), num_replicas=2, rank=1, shuffle=shuffle, drop_last=drop_last)
    order = ordered(sampler)
    assert len(order) == (10 if drop_last else 11)
    assert len(set(order)) == len(order)
    assert (order == sorted(order)) is not shuffle
    assert (ordered(sampler, 0) == ordered(sampler, 1)) is not shuffle


def test_distributed_sampler_seed_counts():
    one, two = (DistributedSampler(range(30), num_replicas=2, rank=0, seed=s) for s in (1, 2))
    assert ordered(one) != ordered(two)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda g: WeightedRandomSampler([0.1] * 20, 20, generator=g),
        lambda g: RandomSampler(range(20), replacement=True, generator=g),
        lambda g: RandomSampler(range(20), num_samples=13, generator=g),
    ],
)
def test_other_samplers_are_listed_alike_on_all_ranks_and_disturb_nothing(make, own):
    generator = torch.Generator().manual_seed(3) if own else None
    sampler = make(generator)
    before = torch.get_rng_state()
    own_before = generator.get_state() if own else None
    first = ordered(sampler)
    torch.rand(5)  # ranks' generators differ by now
    assert ordered(sampler) == first
    assert ordered(sampler, index=1) != first
    torch.set_rng_state(before)
    ordered(sampler)
    assert torch.equal(torch.get_rng_state(), before)
    assert generator is None or torch.equal(generator.get_state(), own_before)


def test_set_epoch_of_a_sampler_is_called():
    class Rotating(Sampler):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __len__(self):
            return 4

        def __iter__(self):
            return iter([(i + self.epoch) % 4 for i in range(4)])

    assert ordered(Rotating(), index=3) == [3, 0, 1, 2]


def test_a_sampler_that_splits_in_its_own_way_is_refused():
    class Own(DistributedSampler):
        def __iter__(self):
            return iter(range(self.rank, 10, self.num_replicas))

    own = Own(range(10), num_replicas=2, rank=0)
    for sampler in (own, BatchSampler(own, 2, False)):
        with pytest.raises(DataError, match="already splits its data over 2 ranks"):
            epoch_order(sampler, 0, Alone(0, 2))


def test_a_sampler_without_length_is_refused():
    class Endless:
        def __iter__(self):
            while True:
                yield 0

    with pytest.raises(DataError, match="Endless has no __len__"):
        epoch_order(Endless(), 0, Alone())


def seen_from(world, width, drop_last, state, size, seed=5, accumulate=2):
    """All indices that the ranks see from a saved state to the end of the pass, per global batch."""
    loaders = [
        prepare_loader(
            DataLoader(range(size), width, shuffle=True, drop_last=drop_last), Alone(rank, world), seed, None, True
        )
        for rank in range(world)
    ]
    per_rank = []
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
        groups = []
        for group in loader.groups(accumulate, train=True):
            groups.append([(micro.batch.tolist() if micro.local else [], micro) for micro in group.micros])
            loader.commit(group)
        per_rank.append(groups)
    return per_rank


@settings(max_examples=40, deadline=None)
@given(st.integers(5, 40), st.integers(1, 5), worlds, st.integers(1, 4), st.booleans())
def test_ranks_together_see_every_sample_once(size, width, world, accumulate, drop_last):
    if drop_last and size < width * world:
        return
    per_rank = seen_from(world, width, drop_last, None, size, accumulate=accumulate)
    assert len({len(groups) for groups in per_rank}) == 1
    seen = []
    for across in zip(*per_rank, strict=True):
        for micros in zip(*across, strict=True):
            assert {micro.total for _, micro in micros} == {sum(len(rows) for rows, _ in micros)}
            assert all(micro.local == len(rows) for rows, micro in micros)
            seen += [row for rows, _ in micros for row in rows]
    left_out = size % (width * world) if drop_last else 0
    assert len(seen) == size - left_out
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("size", [12, 13])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_pass_is_resumed_exactly_at_every_position_under_any_number_of_ranks(world, size):
    reference = take(torch.randperm(size, generator=_generator(5)), 0, size)
    for consumed in range(size + 1):
        state = {"pass": 0, "consumed": consumed, "batches": 1, "finished": False}
        per_rank = seen_from(world, 2, False, state, size)
        seen = [
            row
            for across in zip(*per_rank, strict=True)
            for micros in zip(*across, strict=True)
            for rows, _ in micros
            for row in rows
        ]
        assert seen == reference[consumed:]


def _generator(seed):
    from phalanx.data.seeding import mix

    return torch.Generator().manual_seed(mix(seed, 0))
