"""Datasets that split themselves: Hugging Face's and WebDataset's, the real ones."""

from __future__ import annotations

import io
import tarfile
from collections import Counter

import pytest
from torch.utils.data import DataLoader

from phalanx.data import prepare_loader
from phalanx.errors import DataError
from tests.unit.data_world import Alone

# webdataset leaves its files to the garbage collector.
unclosed = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("already", [False, True])
@pytest.mark.slow  # importing datasets takes seconds
def test_hugging_face_iterables_are_split_once(shards, already):
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    seen = []
    for rank in range(2):
        data = datasets.Dataset.from_dict({"x": list(range(7))}).to_iterable_dataset(num_shards=shards)
        data = data.shuffle(seed=1, buffer_size=3)
        if already:
            data = split_dataset_by_node(data, rank=rank, world_size=2)
        loader = prepare_loader(DataLoader(data, 2, num_workers=0), Alone(rank, 2), 0, None, True)
        passes = [[x for batch in loader for x in batch["x"].tolist()] for _ in range(2)]
        seen.append(passes)
    first, second = ([x for passes in seen for x in passes[n]] for n in (0, 1))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second  # set_epoch was called


@pytest.mark.slow  # importing datasets takes seconds
def test_hugging_face_iterables_with_workers():
    datasets = pytest.importorskip("datasets")
    seen = []
    for rank in range(2):
        data = datasets.Dataset.from_dict({"x": list(range(7))}).to_iterable_dataset(num_shards=4)
        loader = prepare_loader(DataLoader(data, 2, num_workers=2), Alone(rank, 2), 0, None, True)
        seen += [x for batch in loader for x in batch["x"].tolist()]
    assert sorted(seen) == list(range(7))


@pytest.mark.slow  # importing datasets takes seconds
def test_hugging_face_map_style_is_dealt_like_any_other():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(7))}).with_format("torch")
    seen = []
    for rank in range(2):
        loader = prepare_loader(DataLoader(data, 2, shuffle=True), Alone(rank, 2), 0, None, True)
        seen += [x for batch in loader for x in batch["x"].tolist()]
    assert sorted(seen) == list(range(7))


@pytest.fixture
def tars(tmp_path):
    """Four shards with 2, 1, 3 and 1 samples: the numbers 0 to 6."""
    paths, number = [], 0
    for shard, size in enumerate((2, 1, 3, 1)):
        paths.append(str(tmp_path / f"{shard}.tar"))
        with tarfile.open(paths[-1], "w") as tar:
            for _ in range(size):
                content = str(number).encode()
                info = tarfile.TarInfo(f"{number:04}.txt")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
                number += 1
    return paths


def pipeline(wds, tars, **settings):
    return wds.WebDataset(tars, shardshuffle=False, empty_check=False, **settings).decode()


@unclosed
@pytest.mark.parametrize("workers", [0, 2])
def test_webdataset_pipelines_split_themselves(tars, monkeypatch, workers):
    wds = pytest.importorskip("webdataset")
    monkeypatch.setenv("WORLD_SIZE", "2")
    seen = Counter()
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        data = pipeline(wds, tars, nodesplitter=wds.split_by_node)
        user = DataLoader(data, 2, num_workers=workers, collate_fn=_texts)
        seen.update(int(t) for batch in prepare_loader(user, Alone(rank, 2), 0, None, True) for t in batch)
    assert seen == Counter(range(7))


def _texts(samples):
    return [sample["txt"] for sample in samples]


@unclosed
def test_webdataset_without_splitters_says_what_to_add(tars):
    wds = pytest.importorskip("webdataset")
    for data in (pipeline(wds, tars), pipeline(wds, tars, nodesplitter=None)):
        with pytest.raises(DataError, match=r"nodesplitter=webdataset\.split_by_node"):
            prepare_loader(DataLoader(data), Alone(0, 2), 0, None, True)
    with pytest.raises(DataError, match=r"workersplitter=webdataset\.split_by_worker"):
        prepare_loader(DataLoader(pipeline(wds, tars, workersplitter=None)), Alone(), 0, 2, True)
    alone = prepare_loader(DataLoader(pipeline(wds, tars), 2, collate_fn=_texts), Alone(), 0, None, True)
    assert sorted(int(t) for batch in alone for t in batch) == list(range(7))


@unclosed
def test_resampled_webdatasets_need_no_splitter(tars):
    wds = pytest.importorskip("webdataset")
    data = wds.WebDataset(tars, resampled=True, shardshuffle=False).decode().with_epoch(3)
    user = DataLoader(data, 1, collate_fn=_texts)
    assert len(list(prepare_loader(user, Alone(1, 2), 0, None, True))) == 3
