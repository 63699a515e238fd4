"""Full-batch gradient descent on a linear model, whose weights after k steps have a closed form.

Writes facts/<rank>.json (who this rank is, what it sees) and, on rank 0, weights.json; with `--strategies=a,b` one
run after the other in the same launch, and weights-a.json, weights-b.json.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx

SAMPLES, FEATURES, RATE = 48, 3, 0.1


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.sin(torch.arange(SAMPLES * FEATURES, dtype=torch.float32)).reshape(SAMPLES, FEATURES)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5]])


def closed_form(steps: int) -> torch.Tensor:
    """w ← w - rate · 2/N · Xᵀ(Xw - y), from w = 0."""
    x, y = (part.double() for part in data())
    weights = torch.zeros(FEATURES, 1, dtype=torch.float64)
    for _ in range(steps):
        weights -= RATE * 2 / SAMPLES * x.T @ (x @ weights - y)
    return weights


def main(steps: int, pause: float, every: int, strategy: str | None = None, folder: Path | None = None) -> Path:
    """The run directory; `folder` is that of the launch's first run."""
    chosen = {"strategy": strategy} if strategy else {}
    with phalanx.init(checkpoint={"every_steps": every} if every else {}, **chosen) as run:
        model = nn.Linear(FEATURES, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        loader = DataLoader(TensorDataset(*data()), batch_size=SAMPLES // run.topology.world_size)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        if folder is None:
            facts(run)
        for _ in run.epochs(steps):
            for x, y in run.steps(loader):
                run.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(pause)
        weights = run.state_dict(model)
        if run.is_main:
            final = {name: value.flatten().tolist() for name, value in weights.items()}
            name = f"weights-{strategy}.json" if strategy else "weights.json"
            ((folder or run.run_dir) / name).write_text(json.dumps(final))
        return folder or run.run_dir


def facts(run: "phalanx.Run") -> None:
    folder = run.run_dir / "facts"
    folder.mkdir(exist_ok=True)
    place = {name: getattr(run.topology, name) for name in ("rank", "local_rank", "world_size", "num_nodes", "source")}
    seen = {
        "host": os.uname().nodename,
        "cpus": len(os.sched_getaffinity(0)),
        "step": run.step,
        "variables": {name: text for name, text in os.environ.items() if name.startswith(("CUDA_", "MASTER_", "MY_"))},
        "arguments": sys.argv[1:],
        "cwd": str(Path.cwd()),
    }
    (folder / f"{run.topology.rank}.json").write_text(json.dumps(place | seen))


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word.startswith("--") and "=" in word]
    options = dict(word[2:].split("=", 1) for word in words)
    first = None
    for one in options["strategies"].split(",") if "strategies" in options else (None,):
        first = main(
            int(options.get("steps", "5")), float(options.get("pause", "0")), int(options.get("every", "0")), one, first
        )
