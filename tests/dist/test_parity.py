"""The property that matters most: on the same global batches, every strategy trains the same weights.

One table: a new strategy joins by a line in STRATEGIES. The expected weights come from a loop written by hand
with plain torch, in one process, on the batches that the settings define.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import phalanx
from tests.dist.engines import engine_of, environ_for, needs
from tests.dist.harness import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

GLOBAL_BATCH = 12
SAMPLES = 12 * 5 + 7  # the sixth batch of a pass has 7 samples: uneven over 2, 3 and 4 ranks
STEPS = 20
SEED = 11


@dataclass(frozen=True)
class Variant:
    """One way of running; `id` names it in the table."""

    id: str
    accumulate: int = 1
    clip: float | None = None
    precision: str = "fp32"
    optimizer: str = "adamw"
    settings: tuple[tuple[str, object], ...] = ()


VARIANTS = [
    Variant("plain"),
    Variant("sgd", optimizer="sgd"),
    Variant("clip", clip=0.05),
    Variant("accumulate", accumulate=4),  # 6 batches a pass: groups of 4 and 2
    Variant("accumulate-clip", accumulate=4, clip=0.05),
]
STRATEGIES = [
    ("single", 1),
    ("ddp", 1),
    ("fsdp", 1),
    ("ddp", 2),
    ("ddp", 3),
    ("ddp", 4),
    ("fsdp", 2),
    ("fsdp", 4),
    *((f"deepspeed-{stage}", size) for stage in range(4) for size in (1, 2, 4)),
    *(("horovod", size) for size in (1, 2, 4)),
]


class Numbers(Dataset):
    """Regression with noise; returns the index too, so that a test can see who got what."""

    def __init__(self, size: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = torch.sin(self.x.sum(1, keepdim=True)) + 0.1 * torch.randn(size, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.outlet = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


def build(variant: Variant) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = Net()
    if variant.optimizer == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu().clone()


def train(strategy: str, variant: Variant) -> dict[str, object]:
    """A user's script: STEPS steps by the API. Returns weights, the ids of each step, and losses."""
    ids: list[list[int]] = []
    losses: list[float] = []
    settings = {"accumulate": variant.accumulate, "precision": variant.precision, **dict(variant.settings)}
    name, _, stage = strategy.partition("-")
    if stage:
        settings["deepspeed"] = {"zero_stage": int(stage)}
    with phalanx.init(strategy=name, seed=SEED, progress=False, **settings) as run:
        model, optimizer, scheduler = build(variant)
        loader = DataLoader(Numbers(), batch_size=GLOBAL_BATCH // run.world_size, shuffle=True)
        model, optimizer, loader, scheduler = run.prepare(model, optimizer, loader, scheduler)
        while scheduler.last_epoch < STEPS:
            for x, y, index in run.steps(loader):
                with run.accumulate(model):
                    loss = nn.functional.mse_loss(model(x), y)
                    run.backward(loss)
                    if variant.clip is not None:
                        run.clip_grad_norm(model, variant.clip)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(run.reduce(loss, weight=len(index)).item())
                ids.append(index.tolist())
                if scheduler.last_epoch == STEPS:
                    break
        state = run._session.strategy.saved_model(model).state_dict()  # ZeRO's shards must be gathered
        weights = {name: full(p) for name, p in state.items()}
    return {"weights": weights, "ids": ids, "losses": losses}


def many(cases: list[tuple[str, Variant]]) -> list[dict[str, object]]:
    """Several cases in one rank, one after the other."""
    return [train(strategy, variant) for strategy, variant in cases]


def by_hand(variant: Variant, batches: list[list[int]]) -> tuple[dict[str, Tensor], list[float]]:
    """The same training with plain torch on the given batches of sample ids."""
    torch.manual_seed(SEED)
    model, optimizer, scheduler = build(variant)
    data = Numbers()
    losses = []
    group: list[int] = []
    per_pass = -(-SAMPLES // GLOBAL_BATCH)
    for number, batch in enumerate(batches):
        group += batch
        at = number % per_pass + 1
        with torch.no_grad():
            losses.append(nn.functional.mse_loss(model(data.x[batch]), data.y[batch]).item())
        if at % variant.accumulate and at != per_pass:
            continue
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data.x[group]), data.y[group]).backward()
        if variant.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), variant.clip)
        optimizer.step()
        scheduler.step()
        group = []
    return {name: full(p) for name, p in model.state_dict().items()}, losses


class Results:
    """The table's lines by strategy, world size and variant, each with the ranks' results. The lines of one engine and
    world size are run together, when the first of them is asked for."""

    def __init__(
        self, folders: pytest.TempPathFactory, lines: list[tuple[str, int]], variants: list[Variant], cuda: bool = False
    ) -> None:
        self._folders, self._lines, self._variants, self._cuda = folders, lines, variants, cuda
        self._found: dict[tuple[str, int, str], list[dict[str, object]]] = {}

    def __getitem__(self, key: tuple[str, int, str]) -> list[dict[str, object]]:
        if key not in self._found:
            self._run(engine_of(key[0]), key[1])
        return self._found[key]

    def _run(self, engine: str, world_size: int) -> None:
        names = [name for name, size in self._lines if size == world_size and engine_of(name) == engine]
        cases = [(name, variant) for name in names for variant in self._variants]
        env = environ_for(engine, world_size) if engine == "horovod" else None
        folder = self._folders.mktemp("parity")
        ranks = run_ranks(many, world_size, cases, folder=folder, timeout=280, env=env, cuda=self._cuda)
        for at, (name, variant) in enumerate(cases):
            self._found[name, world_size, variant.id] = [rank[at] for rank in ranks]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory, STRATEGIES, VARIANTS)


def global_batches(ranks: list[dict[str, object]]) -> list[list[int]]:
    """The ids of each micro-batch over all ranks, without repeats."""
    merged = []
    for parts in zip(*(rank["ids"] for rank in ranks), strict=True):
        merged.append(list(dict.fromkeys(i for part in parts for i in part)))
    return merged


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.id)
@pytest.mark.parametrize(("strategy", "world_size"), [pytest.param(*line, marks=needs(line[0])) for line in STRATEGIES])
def test_weights_equal_plain_torch(results, strategy, world_size, variant):
    ranks = results[strategy, world_size, variant.id]
    reference_batches = global_batches(results["single", 1, variant.id])
    assert [sorted(batch) for batch in global_batches(ranks)] == [sorted(batch) for batch in reference_batches]
    expected, expected_losses = by_hand(variant, reference_batches)
    for rank in ranks:
        assert rank["weights"].keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(
                rank["weights"][name], weight, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    torch.testing.assert_close(ranks[0]["losses"][:6], expected_losses[:6], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "world_size"), [pytest.param(*line, marks=needs(line[0])) for line in STRATEGIES if line[1] > 1]
)
def test_every_rank_holds_the_same_weights(results, strategy, world_size):
    for variant in VARIANTS:
        first, *others = results[strategy, world_size, variant.id]
        for other in others:
            for name, weight in first["weights"].items():
                assert torch.equal(other["weights"][name], weight), (variant.id, name)


def test_training_moved_the_weights(results):
    """A parity of untrained models would prove nothing."""
    torch.manual_seed(SEED)
    start = Net().state_dict()
    trained = results["ddp", 2, "plain"][0]["weights"]
    assert (trained["outlet.weight"] - start["outlet.weight"]).abs().max() > 0.01
