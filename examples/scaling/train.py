"""Train a residual network on images in folders, in any number of processes, by the strategy that the command names.

    phalanx run --nproc 4 --strategy ddp train.py -c config/base.yaml

The other scripts beside this one do the same by hand, one for each engine.
"""

import torch
from data import dataset, loader
from model import MODELS
from options import parse, settings
from torch import nn

import phalanx


def main():
    args = parse(__doc__)
    with phalanx.init(**settings(args)) as run:
        torch.manual_seed(args.rnd_seed)
        images, classes = dataset(args)
        model = MODELS[args.model](classes)
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
        model, optimizer, train = run.prepare(model, optimizer, loader(args, images))
        loss_fn = nn.CrossEntropyLoss()

        for epoch in run.epochs(args.epochs):
            for index, (batch, labels) in enumerate(run.steps(train)):
                with run.accumulate(model):
                    loss = loss_fn(model(batch), labels)
                    run.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if run.is_main and index % args.log_int == 0:  # looking at the loss waits for the GPU
                    run.print(f"epoch {epoch}, step {index}, loss {loss.item():.4f}")
        final = run.reduce(loss.detach())
    run.print(f"loss of the last step {final.item():.6f}")


if __name__ == "__main__":
    main()
