"""Train a small network on handwritten digits, in any number of processes, under the strategy that -s names.

The README beside this file lists the strategies, and what starts the processes of each.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx


def datasets():
    """1,797 images of 8 × 8 pixels in 10 classes; each fifth one is for the test."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def accuracy(run, model, loader):
    """The share of all ranks' images whose class the model names."""
    right = rows = 0
    for images, labels in run.evaluate(loader):
        right += (model(images).argmax(dim=1) == labels).sum().item()
        rows += len(labels)
    return run.reduce(right, op="sum") / run.reduce(rows, op="sum")


def checksum(run, model):
    """A number that runs with the same weights share; for the main rank, though all of them hold the weights."""
    weights = run.state_dict(model)
    return sum(tensor.double().abs().sum().item() for tensor in weights.values())


def main():
    parser = phalanx.ArgumentParser(description=__doc__)
    parser.add_argument("-s", "--strategy", default="auto", help="how the processes share the work")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step, over all processes")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    with phalanx.init(strategy=args.strategy) as run:
        torch.manual_seed(0)
        train_data, test_data = datasets()
        train = DataLoader(train_data, batch_size=max(1, args.batch_size // run.world_size), shuffle=True)
        test = DataLoader(test_data, batch_size=100)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
        model, optimizer, train, test = run.prepare(model, optimizer, train, test)
        loss_fn = nn.CrossEntropyLoss()

        for epoch in run.epochs(args.epochs):
            for images, labels in run.steps(train):
                with run.accumulate(model):
                    loss = loss_fn(model(images), labels)
                    run.backward(loss)
                    run.clip_grad_norm(model, 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            right = accuracy(run, model, test)
            run.log({"accuracy": right})
            run.print(f"epoch {epoch}: test accuracy {right:.2f}")

        final, total = accuracy(run, model, test), checksum(run, model)  # calls that all processes make
    strategy, place = run.config.strategy, run.topology
    run.print(f"strategy {strategy}, launcher {place.source}, {run.world_size} ranks, {place.num_nodes} nodes")
    run.print(f"checksum of the weights {total:.5g}")
    run.print(f"test accuracy {final:.2f}")


if __name__ == "__main__":
    main()
