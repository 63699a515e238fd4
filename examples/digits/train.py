"""Train a small network on the handwritten digits that scikit-learn ships.

The same file runs as `python train.py`, under `torchrun`, or by `phalanx run`, in any number of processes.
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx


def datasets():
    """1,797 images of 8 × 8 pixels in 10 classes; a fifth is kept for the test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(64 * 16, 10),
    )  # fmt: skip


def accuracy(run, model, loader):
    """The share of all ranks' images whose class the model names."""
    right = rows = 0
    for images, labels in run.evaluate(loader):
        right += (model(images).argmax(dim=1) == labels).sum().item()
        rows += len(labels)
    return run.reduce(right, op="sum") / run.reduce(rows, op="sum")


def main():
    parser = phalanx.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--lr", type=float, default=4e-3)
    args = parser.parse_args()

    with phalanx.init() as run:
        train_data, test_data = datasets()
        train = DataLoader(train_data, batch_size=args.batch_size, shuffle=True)
        test = DataLoader(test_data, batch_size=256)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
        model, optimizer, train, test, scheduler = run.prepare(model, optimizer, train, test, scheduler)
        loss_fn = nn.CrossEntropyLoss()

        for _ in run.epochs(args.epochs):
            for images, labels in run.steps(train):
                with run.accumulate(model):
                    loss = loss_fn(model(images), labels)
                    run.backward(loss)
                    run.clip_grad_norm(model, 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            scheduler.step()
            run.log({"accuracy": accuracy(run, model, test)})

        final = accuracy(run, model, test)  # a resumed run may have no epoch left to do

    run.print(f"run directory {run.run_dir}")
    run.print(f"test accuracy {final:.4f}")


if __name__ == "__main__":
    main()
