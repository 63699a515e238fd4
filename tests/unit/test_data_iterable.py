"""Iterable datasets: every item once over ranks and workers, whoever splits."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import phalanx
from phalanx.data import prepare_loader
from phalanx.errors import DataError
from tests.unit.data_world import Alone, flat, in_ranks


class Plain(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


class Sharding(Plain):
    """Splits by the helper, after a shuffle that all ranks must make alike."""

    def __iter__(self):
        items = list(range(self.size))
        random.shuffle(items)
        yield from phalanx.shard(items)


class ByWorker(Plain):
    """Splits by torch's worker info, as torch's documentation shows it."""

    def __iter__(self):
        info = get_worker_info()
        low, high = 0, self.size
        if info is not None:
            each = -(-self.size // info.num_workers)
            low, high = info.id * each, min(self.size, (info.id + 1) * each)
        return iter(range(low, high))


class OnlySeeds(Plain):
    """Reads its worker's number, but splits nothing."""

    def __iter__(self):
        info = get_worker_info()
        self.seed = 0 if info is None else info.id
        yield from range(self.size)


class Shuffling(Plain):
    """Shuffles by the global generator, item by item, and splits nothing."""

    def __iter__(self):
        waiting = list(range(self.size))
        while waiting:
            yield waiting.pop(int(torch.randint(len(waiting), ())))


def _total(samples):
    torch.rand(len(samples))  # a collate_fn that draws must not shift the dataset's shuffle
    return torch.tensor(samples)


def items(make, world, workers, size, passes=1, **settings):
    """What each rank sees in the last of `passes` passes."""
    seen = []
    for rank in range(world):
        user = DataLoader(make(size), **{"batch_size": 2, "num_workers": workers, "collate_fn": _total, **settings})
        loader = prepare_loader(user, Alone(rank, world), 11, None, True)
        for _ in range(passes):
            batches = list(loader)
        seen.append([item for batch in batches for item in batch.reshape(-1).tolist()])
    return seen


@pytest.mark.parametrize("make", [Plain, Sharding, ByWorker, OnlySeeds, Shuffling])
@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 0), (3, 0), (2, 1), (2, 2)])
def test_seven_and_eight_items_are_seen_once(make, world, workers):
    for size in (7, 8):
        seen = items(make, world, workers, size)
        assert sorted(flat(seen)) == list(range(size))
        assert world > size or all(seen)


def test_items_left_over_go_to_different_ranks():
    assert [len(seen) for seen in items(Plain, 2, 2, 6)] == [3, 3]


def test_a_shuffle_before_the_split_differs_by_pass():
    first, second = (items(Sharding, 2, 0, 20, passes) for passes in (1, 2))
    assert sorted(flat(second)) == list(range(20))
    assert first != second


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 0), (2, 2)])
def test_unbatched_iterables_are_split_too(world, workers):
    seen = items(Plain, world, workers, 7, batch_size=None, collate_fn=torch.as_tensor)
    assert sorted(flat(seen)) == list(range(7))


def test_random_numbers_after_the_split_differ_between_ranks():
    """The same augmentation on all ranks is a classic fault; the shuffle before the split is the same, though."""

    class Noisy(Plain):
        def __iter__(self):
            for item in phalanx.shard(range(self.size)):
                yield random.random() + item * 0

    def noise(rank):
        user = DataLoader(Noisy(8), 4, collate_fn=list)
        return flat(prepare_loader(user, Alone(rank, 2), 1, None, True))

    assert set(noise(0)).isdisjoint(noise(1))
    assert noise(1) == noise(1)


def test_shard_outside_a_prepared_loader_follows_the_environment(monkeypatch):
    assert list(phalanx.shard(range(5))) == [0, 1, 2, 3, 4]
    monkeypatch.setenv("WORLD_SIZE", "2")
    parts = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        parts.append([int(x) for x in DataLoader(Sharding(7), batch_size=None, num_workers=2)])
    assert all(0 < len(part) < 7 for part in parts)


def test_declared_splitting_is_believed():
    class Own(Plain):
        splits_itself = True

    assert items(Own, 2, 0, 4) == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_a_dataset_that_knows_the_world_size_has_to_say_who_splits():
    class Suspicious(Plain):
        world_size = 2

    class Declared(Suspicious):
        splits_itself = False

    with pytest.raises(DataError, match=r"Suspicious has world_size = 2.*splits_itself = True"):
        items(Suspicious, 2, 0, 4)
    assert sorted(flat(items(Declared, 2, 0, 4))) == [0, 1, 2, 3]
    assert items(Suspicious, 1, 0, 4) == [[0, 1, 2, 3]]


class Uneven(IterableDataset):
    """`sizes[rank]` items on each rank."""

    splits_itself = True

    def __init__(self, sizes, rank):
        self.size = sizes[rank]

    def __iter__(self):
        return iter(range(self.size))


def uneven(sizes, accumulate, train, state=None):
    def run(peers):
        loader = prepare_loader(DataLoader(Uneven(sizes, peers.rank), 2), peers, 0, None, train)
        if state:
            loader.load_state_dict(state)
        groups = []
        for group in loader.groups(accumulate, train):
            groups.append((group.total, [(m.batch.tolist(), m.local, m.total) for m in group.micros]))
            assert group.size == len(groups[-1][1])
            if train:
                loader.commit(group)
        return groups, peers.borrowed, loader.state_dict()

    return in_ranks(len(sizes), run)


def test_unequal_counts_neither_hang_nor_lose_data_in_training():
    (long, lent, state), (short, borrowed, _) = uneven([7, 3], 2, True)
    assert long == [(7, [([0, 1], 2, 4), ([2, 3], 2, 3)]), (3, [([4, 5], 2, 2), ([6], 1, 1)])]
    assert short == [(7, [([0, 1], 2, 4), ([2], 1, 3)]), (3, [([2], 0, 2), ([2], 0, 1)])]
    assert lent == borrowed == 0
    assert state == {"pass": 0, "consumed": 10, "batches": 4, "finished": True, "world_size": 2}


def test_unequal_counts_give_zero_rows_in_evaluation():
    (long, _, _), (short, _, _) = uneven([5, 2], 1, False)
    assert [total for total, _ in long] == [total for total, _ in short] == [4, 2, 1]
    assert short == [(4, [([0, 1], 2, 4)]), (2, [([], 0, 2)]), (1, [([], 0, 1)])]


@pytest.mark.parametrize("train", [True, False])
def test_a_rank_that_never_has_data_borrows_once(train):
    empty, full = uneven([0, 5], 1, train)
    assert [total for total, _ in empty[0]] == [2, 2, 1]
    assert empty[1] == full[1] == 1
    assert empty[0][0] == (2, [([0, 1] if train else [], 0, 2)])


def test_nothing_anywhere_is_an_empty_pass():
    assert [groups for groups, _, _ in uneven([0, 0], 2, False)] == [[], []]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_group_totals_whatever_the_accumulation(accumulate):
    ranks = uneven([9, 4, 0], accumulate, True)
    assert len({tuple(total for total, _ in groups) for groups, _, _ in ranks}) == 1
    assert sum(total for total, _ in ranks[0][0]) == 13
    assert [sum(m[1] for _, ms in groups for m in ms) for groups, _, _ in ranks] == [9, 4, 0]


def test_a_pass_is_resumed_after_the_batches_that_were_used():
    whole = uneven([7, 3], 1, True)
    for done in range(5):
        used = sum(total for total, _ in whole[0][0][:done])
        state = {"pass": 0, "consumed": used, "batches": done, "finished": False, "world_size": 2}
        rest = uneven([7, 3], 1, True, state)
        assert [groups for groups, _, _ in rest] == [groups[done:] for groups, _, _ in whole]
        assert rest[0][2]["consumed"] == 10


def test_another_world_size_is_warned_of_and_skips_as_many():
    loader = prepare_loader(DataLoader(Plain(16), 2), Alone(0, 1), 0, None, True)
    with pytest.warns(UserWarning, match="1 ranks in a pass begun under 2"):
        loader.load_state_dict({"pass": 0, "consumed": 8, "batches": 2, "finished": False, "world_size": 2})
    assert flat(batch.tolist() for batch in loader) == list(range(8, 16))


@pytest.mark.parametrize("workers", [0, 2])
def test_random_items_are_resumed_exactly(workers):
    def rest(state):
        user = DataLoader(Shuffling(24), 2, num_workers=workers)
        loader = prepare_loader(user, Alone(), 5, None, True)
        if state:
            loader.load_state_dict(state)
        return [m.batch.tolist() for group in loader.groups(1, True) for m in group.micros]

    whole = rest(None)
    assert rest({"pass": 0, "consumed": 6, "batches": 3, "finished": False}) == whole[3:]


@pytest.mark.parametrize("workers", [0, 1])
def test_set_epoch_is_called_with_the_pass(workers):
    class Epochs(Plain):
        epoch = -1

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch] * self.size)

    persistent = bool(workers)
    user = DataLoader(Epochs(2), 2, num_workers=workers, persistent_workers=persistent)
    loader = prepare_loader(user, Alone(), 0, None, True)
    assert [next(iter(list(loader))).tolist() for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]


def test_a_batch_that_cannot_be_counted_is_an_error():
    class Texts(IterableDataset):
        def __iter__(self):
            yield "one"

    loader = prepare_loader(DataLoader(Texts(), batch_size=None), Alone(), 0, None, True)
    with pytest.raises(DataError, match="cannot count the samples of a batch of type str"):
        list(loader.groups(1, True))
