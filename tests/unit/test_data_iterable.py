"""Iterable datasets: every item once over ranks and workers, whoever splits."""

from __future__ import annotations

import random
from itertools import islice

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


def _number():
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def by_rank_then_worker(rank, world, items):
    worker, workers = _number()
    return items[rank * workers + worker :: world * workers]


def by_worker_then_rank(rank, world, items):
    worker, workers = _number()
    return items[worker * world + rank :: world * workers]


def files_of_the_rank(rank, world, items):
    worker, workers = _number()
    return items[rank::world][worker::workers]


def stretches(rank, world, items):
    worker, workers = _number()
    each = -(-len(items) // (world * workers))
    first = (rank * workers + worker) * each
    return items[first : first + each]


def in_a_generator(rank, world, items):
    worker, workers = _number()
    return islice((item for item in items), rank * workers + worker, None, world * workers)


class OfRank(IterableDataset):
    """Splits by its rank, as scripts for plain torch do."""

    def __init__(self, part, rank, world, size=12):
        self.part, self.rank, self.world_of, self.size = part, rank, world, size

    def __iter__(self):
        return iter(self.part(self.rank, self.world_of, range(self.size)))


WAYS = [by_rank_then_worker, by_worker_then_rank, files_of_the_rank, stretches, in_a_generator]


def passes_of(make, world, workers, passes=1, **settings):
    """For each rank, the samples of each of its `passes` as they count in training."""

    def run(peers):
        settings_here = {"batch_size": 1, "num_workers": workers, **settings}
        loader = prepare_loader(DataLoader(make(peers.rank, world), **settings_here), peers, 3, None, True)
        found = []
        for _ in range(passes):
            micros = [m for group in loader.groups(1, True) for m in group.micros if m.local]
            found.append(flat(m.batch.tolist() for m in micros))
        return found

    return in_ranks(world, run)


@pytest.mark.parametrize("part", WAYS)
@pytest.mark.parametrize(("world", "workers"), [(2, 0), (3, 0), (2, 2)])
def test_a_split_by_rank_and_worker_is_an_error_on_all_ranks(part, world, workers):
    begun = []

    def run(peers):
        loader = prepare_loader(
            DataLoader(OfRank(part, peers.rank, world), 1, num_workers=workers), peers, 3, None, True
        )
        with pytest.raises(DataError, match=r"OfRank splits by get_worker_info.*by the rank too.*phalanx\.shard"):
            begun.extend(loader.groups(1, True))
        return True

    assert all(in_ranks(world, run))
    assert begun == []


@pytest.mark.parametrize("part", WAYS)
@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_a_split_by_rank_and_worker_may_be_declared(part, world, workers):
    class Declared(OfRank):
        splits_itself = True

    seen = passes_of(lambda rank, world: Declared(part, rank, world), world, workers)
    assert sorted(flat(flat(seen))) == list(range(12))


class Once(IterableDataset):
    """Its items can be read a single time, and it splits what it reads; with `of_rank` by the rank too."""

    def __init__(self, rank, world, of_rank=False):
        self.source = (item for item in range(12))
        self.place = (rank, world) if of_rank else (0, 1)

    def __iter__(self):
        (worker, workers), (rank, world) = _number(), self.place
        return islice(self.source, rank * workers + worker, None, world * workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_can_be_read_once_only_is_read_once(workers):
    assert sorted(flat(flat(passes_of(Once, 2, workers)))) == list(range(12))
    with pytest.raises(DataError, match="yields other items on other ranks or workers before it is split"):
        passes_of(lambda rank, world: Once(rank, world, True), 2, workers)


class Counting(IterableDataset):
    """Splits by get_worker_info, and counts how often it was begun; a cursor of its own remembers where it is."""

    def __init__(self, rank, world):
        self.begun, self.waiting = 0, list(range(12))

    def __iter__(self):
        self.begun += 1
        worker, workers = _number()
        while self.waiting:
            item = self.waiting.pop(0)
            if item % workers == worker:
                yield item


@pytest.mark.parametrize("workers", [0, 2])
def test_trying_a_stream_changes_nothing_of_it(workers):
    made = []

    def make(rank, world):
        made.append(Counting(rank, world))
        return made[-1]

    assert sorted(flat(flat(passes_of(make, 2, workers)))) == list(range(12))
    assert {one.begun for one in made} == {0 if workers else 1}


class Noisy(IterableDataset):
    """Splits by get_worker_info; `generator(rank)` makes its random numbers, None are the global ones."""

    def __init__(self, generator, rank, world):
        self.generator, self.rank = generator, rank

    def __iter__(self):
        draws = self.generator(self.rank)
        worker, workers = _number()
        for item in range(worker, 12, workers):
            yield item + draws.random() / 2


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_may_differ_by_rank(workers, recwarn):
    seen = passes_of(lambda *place: Noisy(lambda rank: random, *place), 2, workers)
    assert sorted(map(int, flat(flat(seen)))) == list(range(12))
    assert not [w for w in recwarn if "splits_itself" in str(w.message)]
    with pytest.warns(UserWarning, match="random numbers that nobody seeds"):
        seen = passes_of(lambda *place: Noisy(lambda rank: random.SystemRandom(), *place), 2, workers)
    assert sorted(map(int, flat(flat(seen)))) == list(range(12))


def test_random_numbers_of_the_rank_have_to_be_declared():
    class Declared(Noisy):
        splits_itself = "worker_info"

    def by_rank(rank):
        return random.Random(rank)

    with pytest.raises(DataError, match='splits_itself = "worker_info"'):
        passes_of(lambda *place: Noisy(by_rank, *place), 2, 0)
    assert sorted(map(int, flat(flat(passes_of(lambda *place: Declared(by_rank, *place), 2, 0))))) == list(range(12))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_tried_in_its_first_pass_only(workers, tmp_path):
    class Noting(IterableDataset):
        def __iter__(self):
            with (tmp_path / "begun").open("a") as file:
                file.write("x")
            return iter(range(12)[slice(_number()[0], None, _number()[1])])

    seen = passes_of(lambda *_: Noting(), 2, workers, passes=3)
    for at in range(3):
        assert sorted(flat(rank[at] for rank in seen)) == list(range(12))
    tried = len((tmp_path / "begun").read_text()) - 2 * max(1, workers) * 3
    # The worker that has a rank's first batch tries; another may begin after what they met was compared.
    assert 2 <= tried <= 2 * max(1, workers)
