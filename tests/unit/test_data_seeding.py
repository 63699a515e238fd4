"""Random numbers of samples: the same whatever the workers and ranks, and apart from the run's own."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, StackDataset, Subset, TensorDataset

from phalanx.data import numpy_state as numpy_aside
from phalanx.data import prepare_loader, seeding
from phalanx.data.seeding import draws_nothing, extend, fetches_batches, mix, seed_all, undisturbed
from tests.unit.data_world import Alone


def draws():
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Augmented(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([float(index), *draws()], dtype=torch.float64)


class Batched(Augmented):
    def __getitems__(self, indices):
        noise = float(torch.rand(()))
        return [torch.tensor([i, noise]) for i in indices]


class Stream(IterableDataset):
    def __iter__(self):
        for item in range(12):
            yield torch.tensor([float(item), *draws()], dtype=torch.float64)


def rows(dataset, workers=0, world=1, passes=1, seed=3, train=True, **settings):
    """{index: values} over all ranks, of the last of `passes` passes."""
    seen = {}
    for rank in range(world):
        user = DataLoader(dataset, 2, num_workers=workers, **settings)
        loader = prepare_loader(user, Alone(rank, world), seed, None, train)
        for _ in range(passes):
            batches = list(loader)
        seen |= {int(row[0]): row[1:].tolist() for batch in batches for row in batch}
    return seen


def test_mix_is_splitmix64():
    """The first outputs of Vigna's generator with seed 0, which are published with it."""
    assert extend(0, 0) == 0xE220A8397B1DCDAF
    assert extend(0x9E3779B97F4A7C15, 0) == 0x6E789E6AA1B965F4
    assert mix(1, 2, 3) == extend(mix(1, 2), 3)
    assert len({mix(a, b) for a in range(-2, 30) for b in range(30)}) == 32 * 30


@pytest.mark.parametrize("dataset", [Augmented(), Stream(), Subset(Augmented(), range(12))])
@pytest.mark.parametrize("train", [True, False])
def test_augmentation_depends_on_neither_workers_nor_ranks(dataset, train):
    """Draws of random, NumPy and torch in a sample, with 0, 1 and 2 workers and 1 and 2 ranks."""
    reference = rows(dataset, train=train)
    assert len(reference) == 12
    assert len({tuple(values) for values in reference.values()}) == 12
    assert rows(dataset, workers=1, train=train) == reference
    assert rows(dataset, workers=2, world=2, train=train) == reference
    assert rows(dataset, world=2, train=train) == reference


@pytest.mark.parametrize("dataset", [Augmented(), Stream()])
def test_augmentation_differs_by_pass_and_seed(dataset):
    reference = rows(dataset)
    for other in (rows(dataset, passes=2), rows(dataset, seed=4)):
        assert all(a != b for i in reference for a, b in zip(reference[i], other[i], strict=True))


@pytest.mark.parametrize("dataset", [Augmented(), Stream()])
def test_persistent_workers_learn_of_the_pass(dataset):
    assert rows(dataset, workers=2, passes=3, persistent_workers=True) == rows(dataset, passes=3)


def test_numpy_and_torch_draw_different_numbers():
    """Both start a Mersenne Twister from 32 bits: given the same ones, their streams would be equal."""
    (_, by_numpy, by_torch) = rows(Augmented())[0]
    assert abs(by_numpy - by_torch) > 1e-4


@pytest.mark.parametrize("dataset", [Augmented(), TensorDataset(torch.ones(12))])
def test_collate_draws_alike_in_any_process(dataset):
    def noise(workers):
        user = DataLoader(dataset, 3, num_workers=workers, collate_fn=_noise)
        return list(prepare_loader(user, Alone(), 1, None, True))

    first = noise(0)
    assert len(set(first)) == 4
    assert noise(2) == first


def _noise(samples):
    return (float(torch.rand(())), random.random(), float(np.random.rand()))


def test_collate_of_an_iterable_draws_anew_each_batch():
    user = DataLoader(_Silent(), 3, collate_fn=_noise)
    per_rank = [list(prepare_loader(user, Alone(rank, 2), 1, None, True)) for rank in (0, 1)]
    assert len({*per_rank[0], *per_rank[1]}) == 4


class _Silent(IterableDataset):
    def __iter__(self):
        return iter(range(12))


def test_a_datasets_own_batched_access_is_kept_and_seeded_once():
    reference = rows(Batched())
    assert len({tuple(v) for v in reference.values()}) == 6
    assert rows(Batched(), workers=2) == reference
    assert rows(Subset(Batched(), range(12))) == reference


@pytest.mark.parametrize("dataset", [Augmented(), Stream(), TensorDataset(torch.ones(12)), list(range(12))])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("swaps", [True, False])
def test_the_runs_own_random_numbers_are_not_disturbed(dataset, workers, swaps, monkeypatch):
    """Dropout in the loop must not depend on how data is loaded."""
    monkeypatch.setattr(numpy_aside, "_swappable", None if swaps else False)
    monkeypatch.setattr(seeding, "_spares", [])

    def main_draws(loader):
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        np.random.randn()  # leaves a cached second value, which counts as state too
        values = [(draws(), np.random.randn()) for _ in loader]
        return [*values, draws()]

    user = DataLoader(dataset, 2, num_workers=workers, shuffle=None if isinstance(dataset, IterableDataset) else True)
    assert main_draws(prepare_loader(user, Alone(), 0, None, True)) == main_draws(range(6))


def test_this_numpy_lets_its_generator_be_swapped():
    with undisturbed():
        assert numpy_aside._swappable
    generator = np.random.get_bit_generator()
    with undisturbed():
        assert np.random.get_bit_generator() is not generator
    assert np.random.get_bit_generator() is generator


@pytest.mark.parametrize("swaps", [True, False])
def test_a_stream_goes_on_where_it_stopped(swaps, monkeypatch):
    """As one uninterrupted stream of the same seed, kept second values of randn included, nested uses too."""
    monkeypatch.setattr(numpy_aside, "_swappable", None if swaps else False)
    monkeypatch.setattr(seeding, "_spares", [])
    seed_all(11)
    expected = [(draws(), np.random.randn()) for _ in range(4)]
    stream, got = seeding.Stream(11), []
    np.random.seed(5), np.random.randn()
    for _ in range(4):
        with stream.use():
            first = draws()
            with undisturbed():
                seed_all(2)
                assert (draws(), np.random.randn()) != expected[0]
            got.append((first, np.random.randn()))
        np.random.rand(), random.random(), torch.rand(())
    assert got == expected


def test_a_bit_generator_of_the_users_own_is_kept():
    """Seeding a sample works under it as well, though PCG64 can't be seeded anew."""
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        reference = rows(Augmented())
        assert np.random.rand() == np.random.Generator(np.random.PCG64(3)).random()
    finally:
        np.random.set_bit_generator(before)
    assert rows(Augmented()) == reference


def test_undisturbed_holds_after_an_error():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)

    def fail():
        with undisturbed():
            raise ZeroDivisionError(torch.rand(7))

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.equal(torch.rand(3), expected)


def test_which_datasets_draw_nothing():
    plain = TensorDataset(torch.ones(3))

    class Noisy(TensorDataset):
        pass

    for quiet in (
        plain,
        Subset(plain, [0]),
        ConcatDataset([plain, plain]),
        StackDataset(plain),
        StackDataset(a=plain),
        [1],
    ):
        assert draws_nothing(quiet)
    for noisy in (Noisy(torch.ones(3)), Subset(Noisy(torch.ones(3)), [0]), ConcatDataset([plain, Augmented()])):
        assert not draws_nothing(noisy)
    assert not draws_nothing(StackDataset(plain, Noisy(torch.ones(3))))


def test_which_datasets_fetch_batches():
    assert not fetches_batches(Augmented())
    assert not fetches_batches(Subset(Subset(Augmented(), [0]), [0]))
    assert not fetches_batches(StackDataset(Augmented()))
    assert fetches_batches(Subset(Batched(), [0]))
    assert fetches_batches(StackDataset(a=Batched()))


def test_known_quiet_datasets_are_left_unwrapped():
    data = TensorDataset(torch.ones(4))
    assert prepare_loader(DataLoader(data), Alone(), 0, None, True)._feed._loader.dataset is data


@pytest.mark.parametrize("dataset", [Augmented(), Batched(), Stream()])
def test_what_spawned_workers_get_can_be_pickled(dataset):
    inner = prepare_loader(DataLoader(dataset, 2), Alone(), 0, None, True)._feed._loader
    again, collate = pickle.loads(pickle.dumps((inner.dataset, inner.collate_fn)))
    assert type(again.dataset) is type(dataset)
    assert callable(collate)
    again.note = "for the user's dataset"
    assert again.dataset.note == again.note
