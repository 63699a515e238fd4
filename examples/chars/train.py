"""Train a small character-level transformer, as nanoGPT does, on the texts of Python's own `help()`.

    phalanx run --nproc 2 train.py
    phalanx run --nproc 2 --accumulate 4 --max-steps 2000 train.py --width 128 --layers 4
    phalanx run --dry-run train.py          # one step, one batch of the validation, one checkpoint

It trains for a number of steps, not of epochs; one rank prepares the data, and all read it.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset

import phalanx


def characters(path):
    """The text as numbers, and how many characters there are; the file is made if it isn't there."""
    if not path.exists():
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics))
        vocabulary = {character: number for number, character in enumerate(sorted(set(text)))}
        torch.save({"text": torch.tensor([vocabulary[c] for c in text]), "size": len(vocabulary)}, path)
    saved = torch.load(path)
    return saved["text"], saved["size"]


class Chunks(Dataset):
    """Stretches of the text, each with the same one a character on."""

    def __init__(self, text, length):
        self.text, self.length = text, length

    def __len__(self):
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index):
        at = index * self.length
        return self.text[at : at + self.length], self.text[at + 1 : at + 1 + self.length]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.attend(self.norm_in(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.feed(self.norm_out(x))


class Transformer(nn.Module):
    def __init__(self, characters, length, width, layers, heads=4):
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)

    def forward(self, x):
        x = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def validation_loss(run, model, loader):
    """Nats a character, over all ranks; a rank that has run out of data gets zero rows, whose sum is 0."""
    total, count = 0.0, 0
    for x, y in run.evaluate(loader):
        total += functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
        count += y.numel()
    return run.reduce(total, op="sum") / run.reduce(count, op="sum")


def main():
    parser = phalanx.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="chars.pt", help="where the encoded text is kept")
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--length", type=int, default=64, help="characters of a sample")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--log-every", type=int, default=20, help="steps")
    args = parser.parse_args()

    with phalanx.init(max_steps=300, checkpoint={"every_steps": 100}) as run:
        with run.main_first():
            text, size = characters(Path(args.data))
        chunks = Chunks(text, args.length)
        cut = int(0.95 * len(chunks))
        train = DataLoader(Subset(chunks, range(cut)), batch_size=args.batch_size, shuffle=True)
        val = DataLoader(Subset(chunks, range(cut, len(chunks))), batch_size=args.batch_size)

        model = Transformer(size, args.length, args.width, args.layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
        last, warmup = run.config.max_steps, min(20, run.config.max_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * min(1, step / last)))
        )
        model, optimizer, train, val, scheduler = run.prepare(model, optimizer, train, val, scheduler)

        for _ in run.epochs():  # as many as max_steps takes
            for x, y in run.steps(train):
                with run.accumulate(model):
                    loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
                    run.backward(loss)
                    run.clip_grad_norm(model, 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if run.sync_gradients and run.step % args.log_every == 0:  # once a step, however many batches it has
                    run.log({"loss": loss, "norm": run.grad_norm, "lr": scheduler.get_last_lr()[0]})
            run.log({"val_loss": validation_loss(run, model, val)})  # the last epoch's too, though it is cut
        final = validation_loss(run, model, val)

    run.print(f"step {run.step}: validation loss {final:.3f}")


if __name__ == "__main__":
    main()
