"""How `global_batch` samples a step become batches of ranks."""

from __future__ import annotations

import json

import pytest
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from phalanx.cli.main import main
from phalanx.config import load_config
from phalanx.config.deepspeed import engine_config
from phalanx.config.global_batch import share_batch
from phalanx.data import prepare_loader
from phalanx.errors import ConfigError, DataError
from tests.unit.data_world import Alone, flat, in_ranks


def settings(*words):
    return load_config((), words, {}).config


@pytest.mark.parametrize(
    ("total", "ranks", "most", "right"),
    [
        (12, 1, 12, (12, 1)),
        (12, 1, 100, (12, 1)),
        (12, 2, 4, (3, 2)),  # 6 a rank: two of 3; 4 doesn't divide
        (12, 3, 3, (2, 2)),
        (12, 4, 1, (1, 3)),
        (7, 1, 6, (1, 7)),
    ],
)
def test_the_fewest_micro_batches_that_fit(total, ranks, most, right):
    assert share_batch(settings(f"global_batch={total}"), ranks, most) == right


def test_an_accumulation_of_ones_own():
    assert share_batch(settings("global_batch=12", "accumulate=6"), 2, 4) == (1, 6)
    with pytest.raises(ConfigError, match=r"6 samples a rank.*accumulate=4.*6 doesn't divide.*set it to 2 or 3"):
        share_batch(settings("global_batch=12", "accumulate=4"), 2, 4)
    with pytest.raises(ConfigError, match=r"accumulate=1 .*micro-batches of 6 exceed.*batch_size of 4.*2 or 3"):
        share_batch(settings("global_batch=12", "accumulate=1"), 2, 4)


def test_what_does_not_divide_is_refused_with_what_would():
    with pytest.raises(
        ConfigError, match=r"global_batch=12 .* 5 ranks: set global_batch to 10 or 15, or start 4 or 6 "
    ):
        share_batch(settings("global_batch=12"), 5, 4)
    with pytest.raises(ConfigError, match=r"global_batch=3 .* 4 ranks: set global_batch to 4, or start 3 ranks"):
        share_batch(settings("global_batch=3"), 4, 4)
    with pytest.raises(ConfigError, match="global_batch"):
        settings("global_batch=0")


def steps(loader, peers, words=("global_batch=12",), train=True):
    """This rank's samples in each step."""
    prepared = prepare_loader(loader, peers, 0, None, train, config=settings(*words))
    groups = prepared.groups(prepared.accumulate, train=True)
    return [flat(micro.batch.tolist() for micro in group.micros if micro.local) for group in groups]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("ranks", "most"), [(1, 12), (1, 5), (2, 4), (3, 4), (4, 2), (6, 9)])
def test_a_step_has_the_same_samples_at_any_world_size(ranks, most, drop_last):
    """53 samples are 4 steps of 12 and one of 5, or none of it."""
    loader = DataLoader(range(53), most, drop_last=drop_last)
    of_ranks = [steps(loader, Alone(rank, ranks)) for rank in range(ranks)]
    found = [sorted(flat(parts)) for parts in zip(*of_ranks, strict=True)]
    right = [list(range(low, min(low + 12, 53))) for low in range(0, 53, 12)]
    assert found == (right[:-1] if drop_last else right)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(24))


def test_an_iterable_dataset():
    of_ranks = in_ranks(2, lambda peers: steps(DataLoader(Stream(), 4), peers))
    assert [[len(step) for step in of_rank] for of_rank in of_ranks] == [[6, 6], [6, 6]]
    assert sorted(flat(flat(of_ranks))) == list(range(24))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(range(24), batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(range(24)), 4, False)),
        DataLoader(range(24), None),
    ],
)
def test_batches_of_an_unknown_size_are_refused(loader):
    with pytest.raises(DataError, match="global_batch=12 needs a loader with a batch_size"):
        steps(loader, Alone())


def test_deepspeeds_own_fields_agree(tmp_path):
    def made(**said):
        (tmp_path / "ds.json").write_text(json.dumps(said))
        return engine_config(settings("global_batch=12", f"deepspeed.config={tmp_path / 'ds.json'}"), 4, 2)

    right = {"train_micro_batch_size_per_gpu": 3, "train_batch_size": 12, "gradient_accumulation_steps": 2}
    assert made(**right)["train_micro_batch_size_per_gpu"] == 3
    for key, value in right.items():
        with pytest.raises(ConfigError, match=f"{key}: {value + 1} there, but"):
            made(**{key: value + 1})


def test_ranks_that_cannot_share_it_are_refused_before_the_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert main(["run", "--nproc", "5", "global_batch=12", "train.py"]) != 0
    assert "can't be shared evenly by 5 ranks" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
