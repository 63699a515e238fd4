"""An average of the weights under every strategy, and a checkpoint's weights as one file; against plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.cli.main import main
from phalanx.errors import UsageError
from tests.dist.engines import environ_for, needs
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.slow
DECAY = 0.8


class Net(nn.Module):
    """With tied weights, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.b.weight = self.a.weight
        self.c.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def data() -> TensorDataset:
    x = torch.sin(torch.arange(96.0)).reshape(32, 3)
    return TensorDataset(x, x.sum(1, keepdim=True))


def by_hand() -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Weights and their average after four steps of two batches each, and what the average says of the data."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)
    shadow = {name: value.clone() for name, value in model.state_dict().items()}
    for x, y in DataLoader(data(), 8):
        nn.functional.mse_loss(model(x), y).backward()
        model.seen += 1  # two batches
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        for name, value in model.state_dict().items():
            shadow[name] = DECAY * shadow[name] + (1 - DECAY) * value if name != "seen" else value.clone()
    torch.testing.assert_close(dict(average.module.state_dict()), shadow)
    with torch.no_grad():
        said = average.module.eval()(data().tensors[0])
    return dict(model.state_dict()), shadow, said.flatten().tolist()


def begin(run: phalanx.Run) -> tuple[Any, ...]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    loaders = DataLoader(data(), 4 // run.world_size), DataLoader(data(), 4 // run.world_size)
    model, optimizer, train, test = run.prepare(model, optimizer, *loaders)
    return model, optimizer, train, test, run.ema(model, decay=DECAY)


def averaged() -> dict[str, Any]:
    with phalanx.init(name="ema", progress=False, accumulate=2) as run:
        model, optimizer, train, test, ema = begin(run)
        for x, y in run.steps(train):
            with run.accumulate(model):
                run.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            if run.step == 1:  # between
                with ema.applied(), torch.no_grad():
                    model(x)
        before = run.state_dict(model)
        refused = []
        with ema.applied():
            said = torch.cat([run.gather(model(x)) for x, _ in run.evaluate(test)]).flatten().tolist()
            inside = run.state_dict(model)
            for call in (run.save, ema.applied().__enter__):
                try:
                    call()
                except UsageError as error:
                    refused.append(str(error))
        after, mean, path = run.state_dict(model), ema.state_dict(), run.save()
    with phalanx.init(name="ema", progress=False, accumulate=2) as run:
        *_, ema = begin(run)
        run.resume(path)
        resumed = ema.state_dict()
    return {"before": before, "inside": inside, "after": after, "mean": mean, "resumed": resumed, "said": said,
            "refused": refused, "path": str(path)}  # fmt: skip


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


SIZES = {"single": 1, "ddp": 2, "fsdp": 2, "horovod": 2, "deepspeed-0": 2, "deepspeed-2": 2, "deepspeed-3": 2}


@pytest.mark.parametrize(
    ("strategy", "size"), [pytest.param(strategy, size, marks=needs(strategy)) for strategy, size in SIZES.items()]
)
def test_averages_and_exports(tmp_path: Path, strategy: str, size: int) -> None:
    ranks = run_ranks(averaged, size, folder=tmp_path, env=environ_for(strategy, size), timeout=280)
    weights, mean, said = by_hand()
    weights["seen"] = mean["seen"] = torch.tensor(10.0)  # two forwards were with the average
    found = ranks[0]
    torch.testing.assert_close(dict(found["before"]), weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["mean"], mean, rtol=1e-5, atol=1e-6)
    assert sorted(found["said"]) == pytest.approx(sorted(said), abs=1e-5)
    assert same(found["before"], found["after"])
    assert same(found["inside"], found["mean"])
    assert same(found["resumed"], found["mean"])
    assert len(found["refused"]) == 2
    check_export(tmp_path, found["path"], found["after"])
    for other in ranks[1:]:
        assert other["mean"] == other["before"] == {}


def check_export(folder: Path, path: str, weights: dict[str, Tensor]) -> None:
    """Both formats, into modules of their own; an existing file stays."""
    safetensors = pytest.importorskip("safetensors.torch")
    assert main(["checkpoint", "export", path, str(folder / "a.pt")]) == 0
    assert main(["checkpoint", "export", str(Path(path).parents[1]), str(folder / "a.safetensors")]) == 0
    loaded = torch.load(folder / "a.pt")
    assert same(loaded, weights)
    assert loaded["a.weight"] is loaded["b.weight"] or loaded["a.weight"].data_ptr() == loaded["b.weight"].data_ptr()
    net = Net().requires_grad_(False)
    for parameter in net.parameters():
        parameter.zero_()
    safetensors.load_model(net, folder / "a.safetensors")
    assert same(dict(net.state_dict()), weights)
    assert "b.weight" not in safetensors.load_file(folder / "a.safetensors")
    assert main(["checkpoint", "export", path, str(folder / "a.pt")]) == 2
    assert main(["checkpoint", "export", path, str(folder / "a.pt"), "--force"]) == 0
    assert main(["checkpoint", "export", path, str(folder / "b.pt"), "--model", "1"]) == 2
    assert main(["checkpoint", "export", path, str(folder / "b.txt")]) == 2
    assert main(["checkpoint", "list", str(Path(path).parents[1])]) == 0
    assert sorted(file.name for file in folder.iterdir() if file.is_file()) == ["a.pt", "a.safetensors"]
    victim = max(Path(path).glob("*.distcp"), key=lambda file: file.stat().st_size)
    victim.write_bytes(b"\0" * victim.stat().st_size)
    assert main(["checkpoint", "export", path, str(folder / "b.pt")]) == 2
    victim.unlink()
    assert main(["checkpoint", "export", path, str(folder / "b.pt")]) == 2
