"""The digits once more: an average of the weights, the best checkpoint, and state of the script's own.

phalanx run --nproc 2 examples/digits/best.py --epochs 5
phalanx checkpoint export runs/best/<id> digits.safetensors --best
"""

import torch
from torch import nn
from torch.utils.data import DataLoader
from train import accuracy, datasets, network  # beside this file

import phalanx


def main():
    parser = phalanx.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    with phalanx.init(checkpoint={"monitor": "accuracy", "mode": "max", "keep": 1}) as run:
        train_data, test_data = datasets()
        train = DataLoader(train_data, batch_size=16, shuffle=True)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        model, optimizer, train, test = run.prepare(model, optimizer, train, DataLoader(test_data, batch_size=256))
        ema = run.ema(model, decay=0.99)
        seen = run.register("seen", {"images": 0})

        for _ in run.epochs(args.epochs):
            for images, labels in run.steps(train):
                with run.accumulate(model):
                    run.backward(nn.functional.cross_entropy(model(images), labels))
                    optimizer.step()
                    optimizer.zero_grad()
            seen["images"] += len(train_data)
            with ema.applied():  # the averaged weights, for evaluation only
                score = accuracy(run, model, test)
            run.log({"accuracy": score})
            run.save()

    run.print(f"{seen['images']} images seen; best checkpoint {run.best_checkpoint}")


if __name__ == "__main__":
    main()
