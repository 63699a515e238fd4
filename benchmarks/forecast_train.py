"""What benchmarks/forecast.py trains: linear layers on random numbers, as large as one wants. See --help there."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx

parser = argparse.ArgumentParser()
for name in ("width", "depth", "batch", "steps", "most"):
    parser.add_argument(f"--{name}", type=int, required=True)
parser.add_argument("--sleep", type=float, default=0.0)
options = parser.parse_args()

with phalanx.init() as run:
    if run.device.type == "cpu":
        torch.set_num_threads(1)  # of ranks that have fewer cores each at larger sizes, computing isn't the same
    layers = [nn.Linear(64, options.width), nn.ReLU()]
    for _ in range(options.depth):
        layers += [nn.Linear(options.width, options.width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(options.width, 8))
    samples = options.batch * options.steps * options.most  # the same at all sizes, which take as many steps of it
    data = TensorDataset(torch.randn(1, 64).expand(samples, 64), torch.randn(1, 8).expand(samples, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, options.batch))
    for _ in run.epochs(1):
        for x, y in run.steps(loader):
            time.sleep(options.sleep)
            loss = nn.functional.mse_loss(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if run.device.type == "cuda":
                torch.cuda.synchronize()  # so that a step's time is its own
            if run.step + 1 >= options.steps:
                break
