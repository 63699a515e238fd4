"""examples/scaling: the script with Phalanx and those by hand train the same, under every engine and in any number.

What they must end with is computed here by a loop in one process. The images are synthetic and in order, and the small
model has no BatchNorm: then it makes no difference which rank sees which images of a step.
"""

from __future__ import annotations

import contextlib
import functools
import io
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.records import Epoch, Workload, read_records
from tests.dist.engines import environ_for, needs
from tests.dist.harness import run_ranks
from tests.e2e import scaling_tutorial as tutorial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

GLOBAL_BATCH, STEPS, EPOCHS, SEED, RATE, MOMENTUM = 8, 6, 2, 3, 0.1, 0.9
LEFT_OVER = 5  # images that fill no batch
COUNT = GLOBAL_BATCH * STEPS + LEFT_OVER


@functools.lru_cache(maxsize=1)
def expected() -> float:
    with tutorial.modules("data") as (data,):
        return last_loss(data.Synthetic(COUNT, 32), 1000)


def last_loss(images: Any, classes: int) -> float:
    """The last step's loss: plain SGD with momentum, as its textbooks have it."""
    with tutorial.modules("model") as (model_file,):
        torch.manual_seed(SEED)
        model = model_file.MODELS["tiny"](classes)
        weights, speeds = list(model.parameters()), [torch.zeros_like(p) for p in model.parameters()]
        for step in range(STEPS * EPOCHS):
            images.set_epoch(step // STEPS)
            first = step % STEPS * GLOBAL_BATCH
            batch, labels = zip(*(images[first + index] for index in range(GLOBAL_BATCH)), strict=True)
            logits = model(torch.stack(batch))
            loss = -logits.log_softmax(1)[range(GLOBAL_BATCH), list(labels)].mean()
            with torch.no_grad():
                for weight, speed, slope in zip(weights, speeds, torch.autograd.grad(loss, weights), strict=True):
                    speed.mul_(MOMENTUM).add_(slope)
                    weight.sub_(RATE * speed)
    return loss.item()


def rank(script: str, folder: str, options: list[str]) -> str:
    """The script in this process: its output."""
    sys.argv = [script, *options]
    sys.path.insert(0, folder)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(Path(folder, script)), run_name="__main__")
    return said.getvalue()


def train(script: str, strategy: str, world_size: int, folder: Path, *more: str) -> list[str]:
    name, _, stage = strategy.partition("-")
    config = tutorial.FOLDER / "config"
    options = ["-c", str(config / "base.yaml"), "-c", str(config / f"{name if name != 'single' else 'ddp'}.yaml")]
    values: dict[str, Any] = {
        "model": "tiny", "image-size": 32, "subset-size": COUNT, "epochs": EPOCHS, "nworker": 0, "shuff": False,
        "batch-size": GLOBAL_BATCH // world_size, "rnd-seed": SEED, "lr": RATE, "momentum": MOMENTUM, "log-int": 1,
        **({"zero-stage": stage} if stage else {}),
    }  # fmt: skip
    options += ["--synthetic", *(f"--{key}={value}" for key, value in values.items()), *more]
    environ = environ_for(name, world_size)
    return run_ranks(rank, world_size, script, str(tutorial.FOLDER), options, folder=folder, env=environ)


CASES = [
    ("train.py", "single", 1),
    ("train.py", "ddp", 2),
    ("train.py", "horovod", 2),
    ("train.py", "deepspeed-2", 2),
    ("ddp_trainer.py", "ddp", 1),
    ("ddp_trainer.py", "ddp", 2),
    ("horovod_trainer.py", "horovod", 1),
    ("horovod_trainer.py", "horovod", 2),
    ("deepspeed_trainer.py", "deepspeed-2", 2),
]


@pytest.mark.parametrize(
    ("script", "strategy", "world_size"),
    [pytest.param(*case, marks=needs(case[1]), id="-".join(map(str, case))) for case in CASES],
)
def test_all_scripts_train_the_same(script: str, strategy: str, world_size: int, tmp_path: Path) -> None:
    outputs = train(script, strategy, world_size, tmp_path)
    assert "loss" not in "".join(outputs[1:])  # rank 0 alone speaks
    printed = tutorial.losses(outputs[0])
    assert len(printed) == STEPS * EPOCHS + 1
    assert printed[-1] == pytest.approx(expected(), abs=2e-5)
    made_by = "runs" if script == "train.py" else "scalability-metrics"
    ((run_dir,),) = tutorial.run_dirs(tmp_path / made_by).values()
    records = read_records(run_dir)
    epochs = [record.epoch for record in records if isinstance(record, Epoch) and record.rank == 0]
    assert epochs == list(range(EPOCHS))
    (work,) = (record for record in records if isinstance(record, Workload))
    with tutorial.modules("model") as (model_file,):
        parameters = sum(p.numel() for p in model_file.MODELS["tiny"](1000).parameters())
    # What the report compares, so that baselines stand on the curve of the script with Phalanx.
    told = (work.parameters, work.batch_size, work.dataset, work.precision, work.accumulate)
    assert told == (parameters, GLOBAL_BATCH // world_size, COUNT, "fp32", 1)


REAL = [
    ("train.py", "ddp", 2, 1),
    ("train.py", "horovod", 2, 0),
    ("ddp_trainer.py", "ddp", 2, 1),
    ("ddp_trainer.py", "ddp", 1, 0),
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEG files of 7 classes, 8 of each."""
    folder = tmp_path_factory.mktemp("images")
    with tutorial.modules("make_images") as (script,), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_images.py", str(folder), "--classes=7", "--count=8", "--size=40"])
        script.main()
    return folder


@pytest.mark.parametrize(
    ("script", "strategy", "world_size", "workers"),
    [pytest.param(*case, marks=needs(case[1]), id="-".join(map(str, case))) for case in REAL],
)
def test_real_images_are_augmented_alike_by_all_scripts(
    script: str, strategy: str, world_size: int, workers: int, images: Path, tmp_path: Path
) -> None:
    """And loading processes that live on hear of the next epoch."""
    more = ("--synthetic=false", f"--data-dir={images}", f"--nworker={workers}")
    with tutorial.modules("data") as (data,):
        whole = data.ImageFolder(images, 32, SEED)
        chosen = data.Chosen(whole, subset(len(whole)))
        wanted = last_loss(chosen, 7)
    printed = tutorial.losses(train(script, strategy, world_size, tmp_path, *more)[0])
    assert printed[-1] == pytest.approx(wanted, abs=2e-5)


def subset(count: int) -> list[int]:
    """`subset_size` of the options, as torch's own permutation of the seed has it."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(SEED))[:COUNT].tolist()


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=needs("horovod")) for name in ("train.py", "horovod_trainer.py")]
)
def test_horovods_options_reach_it(script: str, tmp_path: Path) -> None:
    """Gradients with 11 bits: close to the others, and not the same."""
    options = ("--fp16-allreduce", "--gradient-predivide-factor=2")
    (*_, last) = tutorial.losses(train(script, "horovod", 2, tmp_path, *options)[0])
    assert last == pytest.approx(expected(), abs=2e-3)
    assert last != pytest.approx(expected(), abs=2e-6)
