"""Prepared map-style loaders: groups, counts, positions, kept settings and errors."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from phalanx.data import prepare_loader
from phalanx.errors import DataError
from tests.unit.data_world import Alone, flat, in_ranks


def prepare(loader, rank=0, world=1, seed=7, workers=None, train=True):
    return prepare_loader(loader, Alone(rank, world), seed, workers, train)


def taken(loader, accumulate=1, train=True):
    """[(total, [(rows, local, total), …]), …] of one pass, each group committed."""
    groups = []
    for group in loader.groups(accumulate, train):
        micros = [(m.batch.tolist(), m.local, m.total) for m in group.micros]
        assert group.size == len(micros)
        assert group.total == sum(m[2] for m in micros)
        if train:
            loader.commit(group)
        groups.append((group.total, micros))
    return groups


def test_groups_of_two_ranks_by_hand():
    """11 samples, 2 ranks of batch 2, two micro-batches a group: global batches of 4, 4 and 3."""
    first, second = (prepare(DataLoader(range(11), 2), rank, 2) for rank in (0, 1))
    assert taken(first, 2) == [(8, [([0, 1], 2, 4), ([4, 5], 2, 4)]), (3, [([8, 9], 2, 3)])]
    assert taken(second, 2) == [(8, [([2, 3], 2, 4), ([6, 7], 2, 4)]), (3, [([10], 1, 3)])]
    assert len(first) == len(second) == 3


def test_a_rank_without_data_repeats_its_batch_at_weight_zero_in_training():
    loaders = [prepare(DataLoader(range(9), 2), rank, 4) for rank in range(4)]
    last = [taken(loader)[-1][1][0] for loader in loaders]
    assert last == [([8], 1, 1), ([2, 3], 0, 1), ([4, 5], 0, 1), ([6, 7], 0, 1)]


def test_a_rank_without_data_takes_zero_rows_in_evaluation():
    loaders = [prepare(DataLoader(range(9), 2), rank, 4, train=False) for rank in range(4)]
    last = [taken(loader, train=False)[-1][1][0] for loader in loaders]
    assert last == [([8], 1, 1), ([], 0, 1), ([], 0, 1), ([], 0, 1)]


def test_evaluating_fewer_samples_than_ranks():
    for rank in range(3):
        loader = prepare(DataLoader(TensorDataset(torch.ones(1, 4)), 2), rank, 3, train=False)
        (group,) = loader.groups(1, train=False)
        (micro,) = group.micros
        assert (micro.local, micro.total) == (int(rank == 0), 1)
        assert micro.batch[0].shape == (int(rank == 0), 4)


def test_evaluating_nothing_gives_no_batches():
    assert taken(prepare(DataLoader([], 2), 1, 2, train=False), train=False) == []


def test_a_resumed_rank_without_data_repeats_what_it_had_before_the_stop():
    whole = prepare(DataLoader(range(9), 2, shuffle=True), 3, 4)
    expected = taken(whole)[-1]
    resumed = prepare(DataLoader(range(9), 2, shuffle=True), 3, 4)
    resumed.load_state_dict({"pass": 0, "consumed": 8, "batches": 1, "finished": False})
    assert taken(resumed) == [expected]
    assert expected[1][0][1] == 0


def test_a_stand_in_is_a_full_batch_where_the_rank_had_nothing_before():
    resumed = prepare(DataLoader(range(5), 2), 3, 4)
    resumed.load_state_dict({"pass": 0, "consumed": 2, "batches": 1, "finished": False, "world_size": 1})
    assert taken(resumed)[0][1] == [([0, 1], 0, 3)]


def test_orders_differ_by_pass_and_ranks_stay_disjoint():
    """Two passes over 16 samples on two ranks: another order, no overlap, the same again for the same seed."""
    passes = []
    for _ in range(2):
        ranks = [prepare(DataLoader(range(16), 4, shuffle=True), rank, 2) for rank in (0, 1)]
        passes.append([[flat(m[0] for _, ms in taken(r) for m in ms) for r in ranks] for _ in range(2)])
    assert passes[0] == passes[1]
    (a0, a1), (b0, b1) = passes[0]
    assert sorted(a0 + a1) == sorted(b0 + b1) == list(range(16))
    assert a0 + a1 != b0 + b1


def test_evaluation_never_reshuffles_and_keeps_no_position():
    loader = prepare(DataLoader(range(10), 3, shuffle=True))
    state = loader.state_dict()
    assert taken(loader, train=False) == taken(loader, train=False)
    assert loader.state_dict() == state
    twice = prepare(DataLoader(range(10), 3, shuffle=True), train=False)
    assert [b.tolist() for b in twice] == [b.tolist() for b in twice]


def test_steps_of_the_coming_pass_are_known_for_a_progress_bar():
    """Also of the second pass, when the first has ended, was left early, or was resumed."""
    loader = prepare(DataLoader(range(10), 2))
    assert loader.steps_left(2) == 3
    first = loader.groups(2, train=True)
    list((group := next(first)).micros)
    loader.commit(group)
    assert loader.steps_left(2) == 3
    resumed = prepare(DataLoader(range(10), 2))
    resumed.load_state_dict(loader.state_dict())
    assert resumed.steps_left(2) == 2
    taken(resumed)
    assert resumed.steps_left(2) == 3


def test_position_counts_committed_groups_and_passes():
    loader = prepare(DataLoader(range(10), 2))
    sizes = {"world_size": 1, "dataset": 10, "units": 10}
    assert loader.state_dict() == {"pass": 0, "consumed": 0, "batches": 0, "finished": False, **sizes}
    groups = loader.groups(2, train=True)
    group = next(groups)
    list(group.micros)
    assert loader.state_dict()["consumed"] == 0
    loader.commit(group)
    assert loader.state_dict() == {"pass": 0, "consumed": 4, "batches": 2, "finished": False, **sizes}
    for group in groups:
        list(group.micros)
        loader.commit(group)
    assert loader.state_dict() == {"pass": 0, "consumed": 10, "batches": 5, "finished": True, **sizes}
    taken(loader)
    assert loader.state_dict()["pass"] == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetched_batches_are_not_consumed(workers):
    def left_after_one(loader):
        groups = loader.groups(1, train=True)
        group = next(groups)
        rows = [m.batch.tolist() for m in group.micros]
        loader.commit(group)
        groups.close()
        return rows, loader.state_dict()

    loader = prepare(DataLoader(range(12), 2, shuffle=True, num_workers=workers))
    rows, state = left_after_one(loader)
    again = prepare(DataLoader(range(12), 2, shuffle=True))
    again.load_state_dict(state)
    rest = [m[0] for _, ms in taken(again) for m in ms]
    assert sorted(flat(rows + rest)) == list(range(12))


def test_a_pass_saved_after_its_last_step_resumes_to_nothing_and_then_goes_on():
    loader = prepare(DataLoader(range(6), 2, shuffle=True))
    loader.load_state_dict({"pass": 2, "consumed": 6, "batches": 3, "finished": False})
    assert taken(loader) == []
    assert loader.state_dict()["finished"]
    straight = prepare(DataLoader(range(6), 2, shuffle=True))
    straight.load_state_dict({"pass": 2, "consumed": 6, "batches": 3, "finished": True})
    assert taken(loader) == taken(straight)
    assert straight.state_dict()["pass"] == 3


def test_a_broken_off_pass_is_followed_by_the_next():
    loader = prepare(DataLoader(range(6), 2, shuffle=True))
    group = next(loader.groups(1, train=True))
    list(group.micros)
    loader.commit(group)
    assert len(taken(loader)) == 3
    assert loader.state_dict()["pass"] == 1


def test_plain_iteration_gives_own_batches_and_moves_the_position():
    loader = prepare(DataLoader(range(9), 2, shuffle=True), 3, 4)
    assert [len(b) for b in loader] == [2]
    assert loader.state_dict()["finished"]
    first = prepare(DataLoader(range(9), 2, shuffle=True), 0, 4)
    assert [b.tolist() for b in first] != [b.tolist() for b in first]


def test_custom_batch_sampler_deals_its_batches_in_turn():
    batches = [[0, 1, 2], [3], [4, 5], [6, 7], [8]]
    loaders = [prepare(DataLoader(range(9), batch_sampler=batches), rank, 2) for rank in (0, 1)]
    assert taken(loaders[0], 2) == [(8, [([0, 1, 2], 3, 4), ([4, 5], 2, 4)]), (1, [([8], 1, 1)])]
    assert taken(loaders[1], 2) == [(8, [([3], 1, 4), ([6, 7], 2, 4)]), (1, [([6, 7], 0, 1)])]
    assert loaders[0].batch_size is None
    assert len(loaders[0]) == 3


def test_torchs_own_batch_sampler_is_read_like_a_batch_size():
    sampler = BatchSampler(SequentialSampler(range(8)), 3, True)
    loader = prepare(DataLoader(range(8), batch_sampler=sampler))
    assert loader.batch_size == 3
    assert [m[0] for _, ms in taken(loader) for m in ms] == [[0, 1, 2], [3, 4, 5]]


def test_items_that_are_batches_agree_on_sizes():
    """batch_size=None on a map-style dataset: items of 3, 1, 2 and 5 rows, and none left for rank 1 at the end."""
    rows = [torch.arange(n) for n in (3, 1, 2, 5, 4)]

    def run(peers):
        return taken(prepare_loader(DataLoader(rows, batch_size=None), peers, 0, None, True), 2)

    first, second = in_ranks(2, run)
    assert [total for total, _ in first] == [total for total, _ in second] == [11, 4]
    assert [m[1:] for _, ms in first for m in ms] == [(3, 4), (2, 7), (4, 4)]
    assert [m[1:] for _, ms in second for m in ms] == [(1, 4), (5, 7), (0, 4)]
    assert second[-1][1][0][0] == list(range(5))


def test_batches_out_of_order_are_counted_as_they_come():
    in_order = DataLoader(range(7), 2, num_workers=2, in_order=False)
    loader = prepare(in_order)
    got = taken(loader)
    assert sorted(row for _, ms in got for m in ms for row in m[0]) == list(range(7))
    assert all(len(m[0]) == m[1] == m[2] for _, ms in got for m in ms)
    assert sorted(total for total, _ in got) == [1, 2, 2, 2]


class Recording(Dataset):
    def __init__(self, size=8):
        self.size, self.epochs, self.marked = size, [], False

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index, len(self.epochs) and self.epochs[-1], self.marked

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def _mark(worker_id):
    torch.utils.data.get_worker_info().dataset.marked = True


def _pair(samples):
    return torch.tensor(samples)


@pytest.mark.parametrize("persistent", [False, True])
def test_set_epoch_and_worker_init_reach_the_users_dataset_in_workers(persistent):
    data = Recording()
    user = DataLoader(data, 4, num_workers=1, persistent_workers=persistent, worker_init_fn=_mark, collate_fn=_pair)
    loader = prepare(user)
    epochs = [{tuple(row[1:]) for _, ms in taken(loader) for m in ms for row in m[0]} for _ in range(3)]
    assert epochs == [{(0, 1)}, {(1, 1)}, {(2, 1)}]
    assert data.epochs == []
    assert not data.marked


def test_evaluation_leaves_the_epoch_alone():
    data = Recording()
    taken(prepare(DataLoader(data, 4, collate_fn=_pair), train=False), train=False)
    assert data.epochs == []


SETTINGS = {
    "num_workers": 2,
    "collate_fn": _pair,
    "timeout": 31.0,
    "worker_init_fn": _mark,
    "multiprocessing_context": "fork",
    "prefetch_factor": 3,
    "persistent_workers": True,
    "in_order": True,
}


def test_the_users_settings_are_kept_and_the_user_loader_is_untouched():
    user = DataLoader(range(8), 4, shuffle=True, **SETTINGS)
    before = dict(vars(user))
    loader = prepare(user)
    inner = loader._feed._loader
    for name in SETTINGS.keys() - {"collate_fn"}:
        assert getattr(inner, name) is getattr(user, name), name
    assert inner.collate_fn.collate is user.collate_fn
    # A setting that a newer torch adds has to be thought about here.
    known = {*SETTINGS, "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator"}
    parameters = set(inspect.signature(DataLoader.__init__).parameters)
    assert parameters - known == {"self", "pin_memory", "pin_memory_device"}
    assert vars(user) == before


def test_num_workers_can_be_overridden_both_ways():
    assert prepare(DataLoader(range(8), 4, **SETTINGS), workers=0)._feed._loader.num_workers == 0
    assert prepare(DataLoader(range(8), 4), workers=1)._feed._loader.num_workers == 1


def test_unknown_attributes_are_the_users():
    user = DataLoader(range(8), 4, shuffle=True)
    loader = prepare(user, 0, 2)
    assert loader.dataset is user.dataset
    assert loader.sampler is user.sampler
    assert not loader.drop_last
    assert loader.batch_size == 4
    with pytest.raises(AttributeError):
        _ = loader.no_such_thing


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_less_training_data_than_ranks_is_an_error_on_every_rank(rank):
    with pytest.raises(DataError, match=r"3 samples.*4 ranks"):
        prepare(DataLoader(range(3), 1), rank, 4)
    with pytest.raises(DataError, match=r"2 batches.*4 ranks"):
        prepare(DataLoader(range(8), batch_sampler=[[0, 1, 2, 3], [4, 5, 6, 7]]), rank, 4)
    prepare(DataLoader(range(3), 1), rank, 4, train=False)


def test_drop_last_that_leaves_nothing_is_an_error():
    with pytest.raises(DataError, match=r"drop_last=True leaves nothing of 7 samples.*2 ranks times 4"):
        prepare(DataLoader(range(7), 4, drop_last=True), 0, 2)
    assert len(prepare(DataLoader(range(8), 4, drop_last=True), 0, 2)) == 1


def test_other_loaders_are_refused():
    class Own(DataLoader):
        def __iter__(self):
            return super().__iter__()

    class Harmless(DataLoader):
        pass

    with pytest.raises(DataError, match="not list"):
        prepare([1, 2])
    with pytest.raises(DataError, match="Own has an __iter__"):
        prepare(Own(range(4)))
    assert len(prepare(Harmless(range(4)))) == 4


def test_length_of_an_iterable():
    class Sized(IterableDataset):
        def __len__(self):
            return 10

        def __iter__(self):
            return iter(range(10))

    class Unsized(IterableDataset):
        def __iter__(self):
            return iter(range(10))

    assert len(prepare(DataLoader(Sized(), 2), 0, 2)) == 3
    with pytest.raises(TypeError):
        len(prepare(DataLoader(Unsized(), 2)))


def test_numpy_keys_and_text_keys():
    class Keyed(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, key):
            return f"{key}:{np.random.randint(10**6)}"

    for sampler in (["a", "b"], [np.int64(0), np.int64(1)]):
        loader = prepare(DataLoader(Keyed(), 2, sampler=sampler))
        first, second = (list(loader) for _ in range(2))
        assert [text.partition(":")[0] for text in first[0]] == [str(key) for key in sampler]
        assert first != second


def test_training_loaders_are_shuffled_each_in_its_own_way():
    """The first as torch's randperm of (seed, pass) would, whatever comes after it; and every rank alike."""
    user = DataLoader(range(40), 4, shuffle=True)
    orders = []
    for number in range(3):
        ranks = [flat(prepare_loader(user, Alone(rank, 2), 7, None, True, number)) for rank in (0, 1)]
        assert sorted(int(i) for i in flat(ranks)) == list(range(40))
        orders.append([int(i) for i in flat(ranks)])
    assert orders[0] == [int(i) for rank in (0, 1) for i in flat(prepare(user, rank, 2))]
    same_place = [sum(a == b for a, b in zip(one, other, strict=True)) for one in orders for other in orders]
    assert [count == 40 for count in same_place] == [True, False, False, False, True, False, False, False, True]


def test_a_position_saved_before_loaders_had_numbers_is_warned_of():
    old = {"pass": 1, "consumed": 8, "batches": 2, "finished": False, "world_size": 1}
    user = DataLoader(range(40), 4, shuffle=True)
    prepare(user).load_state_dict(old)
    second = prepare_loader(user, Alone(), 7, None, True, 1)
    second.load_state_dict({**old, "finished": True})
    second.load_state_dict({**old, "number": 1})
    with pytest.warns(UserWarning, match="a loader other than the first repeats and leaves out samples"):
        second.load_state_dict(old)
    assert len(list(second)) == 8
