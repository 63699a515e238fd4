"""DeepSpeed and Horovod beyond parity: gradients with weights, checkpoints, exports, and what they refuse.

Each launch makes several checks: the ranks of an engine take seconds to import it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.errors import PhalanxError
from tests.dist.engines import environ_for, needs
from tests.dist.harness import run_ranks
from tests.dist.test_api import exported
from tests.dist.test_checkpoint import assert_same, load_only, train
from tests.dist.test_gradients import token_weights, two_losses

pytestmark = pytest.mark.slow
ENGINES = [pytest.param(name, marks=needs(name)) for name in ("deepspeed-0", "deepspeed-2", "deepspeed-3", "horovod")]


def engine_name(strategy: str) -> str:
    return strategy.partition("-")[0]


def weights_and_losses(strategy: str) -> dict[str, Any]:
    name = engine_name(strategy)
    return {
        "tokens": token_weights(name, 2, "fp32"),
        "losses": two_losses(name, False),
        "weighted": two_losses(name, True),
        "export": exported(name)[0],
        "part": part_of(name),
    }


def part_of(strategy: str) -> dict[str, torch.Tensor]:
    """Of a model whose second layer is so large that ZeRO's stage 3 shards it."""
    with phalanx.init(strategy=strategy, progress=False) as run:
        net = nn.Sequential(nn.Linear(2, 400), nn.Linear(400, 400))
        nn.init.constant_(net[1].weight, 0.25)
        model, _ = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        return run.state_dict(run.unwrap(model)[1])


@pytest.mark.parametrize("strategy", ENGINES)
def test_weights_of_losses_and_two_losses_are_a_single_processs(tmp_path: Path, strategy: str) -> None:
    """Explicit weights with accumulation and clipping, two backward passes a step, and the export afterwards."""
    (alone,) = run_ranks(weights_and_losses, 1, "single", folder=tmp_path)
    ranks = run_ranks(weights_and_losses, 2, strategy, folder=tmp_path, env=environ_for(strategy, 2))
    for rank in ranks:
        torch.testing.assert_close(rank["tokens"]["weights"], alone["tokens"]["weights"], rtol=1e-5, atol=1e-6)
        assert rank["tokens"]["norm"] == pytest.approx(alone["tokens"]["norm"], rel=1e-4)
        for part in ("losses", "weighted"):
            torch.testing.assert_close(rank[part], alone[part])
    torch.testing.assert_close(ranks[0]["export"], alone["export"])
    assert ranks[0]["part"].keys() == {"weight", "bias"}
    assert torch.equal(ranks[0]["part"]["weight"], torch.full((400, 400), 0.25))
    assert ranks[1]["export"] == ranks[1]["part"] == {}


STATEFUL = ("deepspeed-1", "deepspeed-3", "horovod")


@pytest.mark.parametrize("strategy", [pytest.param(name, marks=needs(name)) for name in STATEFUL])
def test_resume_and_moves_are_exact(tmp_path: Path, strategy: str) -> None:
    """Interrupted and resumed it is bit-identical to a run left alone; its checkpoint is one for any strategy and
    world size, and any strategy's is one for it."""
    name, settings = engine_name(strategy), {"checkpoint": {"every_steps": 4}, "run_root": "interrupted"}
    left_alone = run_ranks(train, 2, name, 3, folder=tmp_path, env=environ_for(strategy, 2))
    run_ranks(train, 2, name, 3, 11, settings, folder=tmp_path, env=environ_for(strategy, 2))
    (moved,) = run_ranks(load_interrupted, 1, "single", folder=tmp_path)
    resumed = run_ranks(
        train, 2, name, 3, None, {**settings, "resume": "latest"}, folder=tmp_path, env=environ_for(strategy, 2)
    )
    for whole, rest in zip(left_alone, resumed, strict=True):
        assert_same(whole, rest, exact=True)
        assert rest["step"] == 21
    (reference,) = run_ranks(train, 1, "single", 2, 5, {"checkpoint": {"every_steps": 4}}, folder=tmp_path)
    assert reference["step"] == 5
    (saved,) = run_ranks(load_only, 1, "single", folder=tmp_path)
    for rank in run_ranks(load_only, 2, name, folder=tmp_path, env=environ_for(strategy, 2)):
        assert_same(saved, rank, exact=True)
    assert moved["step"] == 8
    assert moved["moments"].keys() == saved["moments"].keys()


def load_interrupted(strategy: str) -> dict[str, Any]:
    import os

    os.environ["PHALANX_RUN_ROOT"] = "interrupted"
    return load_only(strategy)


def averaged(settings: dict[str, Any]) -> tuple[list[float], str]:
    """One SGD step at rate 1 from zero on a loss whose gradient is the rank's own row."""
    rows = torch.tensor([[1.0, 2.0, 0.5], [-0.5, 1.0, 1 / 3]])
    try:
        with phalanx.init(progress=False, **settings) as run:
            model = nn.Linear(3, 1, bias=False)
            nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            model, optimizer, loader = run.prepare(model, optimizer, DataLoader(TensorDataset(rows), batch_size=1))
            for (x,) in run.steps(loader):
                run.backward(model(x).sum())
                optimizer.step()
            return run.unwrap(model).weight.flatten().tolist(), ""
    except PhalanxError as error:
        return [], str(error)


def all_averages() -> list[tuple[list[float], str]]:
    first = averaged({})
    os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"] = "9"  # later runs must not meet anew: ranks would race for addresses
    cases = ({"fp16_allreduce": True}, {"gradient_predivide_factor": 2.0}, {"use_adasum": True})
    fp16 = averaged({"horovod": {"use_adasum": True}, "precision": "fp16"})
    return [first, *(averaged({"horovod": case}) for case in cases), fp16]


def by_srun(rank: int) -> dict[str, str]:
    """As srun starts a script of two ranks without any command of ours."""
    names = ("SLURM_PROCID", "SLURM_LOCALID")
    shared = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0", "PHALANX_STRATEGY": "horovod"}
    return {**shared, **{name: str(rank) for name in names}}


@pytest.mark.parametrize("start", [pytest.param(by_srun, marks=needs("horovod"))])
def test_horovods_ways_to_average_in_runs_of_one_process(tmp_path: Path, start: Any) -> None:
    mean = [-0.25, -1.5, -(0.5 + 1 / 3) / 2]
    for rank in run_ranks(all_averages, 2, folder=tmp_path, env=start):
        plain, half, divided, adasum, fp16 = rank
        assert plain[0] == pytest.approx(mean, rel=1e-6)
        assert divided[0] == pytest.approx(mean, rel=1e-6)
        assert half[0] == pytest.approx(mean, rel=1e-3)
        assert half[0][2] != plain[0][2]  # 1/3 is no number of fp16
        assert "use_adasum needs Horovod with MPI" in adasum[1]
        assert "use_adasum can't have precision=fp16" in fp16[1]


def with_optimizer(kind: str, stage: int, settings: dict[str, Any]) -> str:
    """What prepare says to an optimizer."""
    import importlib

    module, _, name = kind.rpartition(".")
    try:
        with phalanx.init(progress=False, deepspeed={"zero_stage": stage, **settings}) as run:
            model = nn.Linear(2, 2)
            optimizer = getattr(importlib.import_module(module), name)(model.parameters(), lr=0.1)
            run.prepare(model, optimizer)
    except PhalanxError as error:
        return str(error)
    return ""


def second_pair() -> str:
    try:
        with phalanx.init(progress=False) as run:
            pairs = [(model, torch.optim.SGD(model.parameters())) for model in (nn.Linear(1, 1), nn.Linear(1, 1))]
            run.prepare(*pairs[0], *pairs[1])
    except PhalanxError as error:
        return str(error)
    return ""


def refusals(folder: str) -> dict[str, str]:
    Path(folder, "ds.json").write_text(json.dumps({"zero_allow_untested_optimizer": True}))
    Path(folder, "clip.json").write_text(json.dumps({"gradient_clipping": 1.0}))
    return {
        "LBFGS": with_optimizer("torch.optim.LBFGS", 0, {}),
        "Adagrad": with_optimizer("torch.optim.Adagrad", 1, {}),
        "Adafactor": with_optimizer("torch.optim.Adafactor", 2, {}),
        "Adafactor-0": with_optimizer("torch.optim.Adafactor", 0, {}),
        "Adafactor-trusted": with_optimizer("torch.optim.Adafactor", 1, {"config": f"{folder}/ds.json"}),
        "RMSprop": with_optimizer("torch.optim.RMSprop", 3, {}),
        "two": second_pair(),
        "clipping": with_optimizer("torch.optim.SGD", 1, {"config": f"{folder}/clip.json"}),
    }


@pytest.mark.parametrize("strategy", [pytest.param("deepspeed", marks=needs("deepspeed"))])
def test_optimizers_that_zero_would_change_are_refused(tmp_path: Path, strategy: str) -> None:
    (said,) = run_ranks(refusals, 1, str(tmp_path), folder=tmp_path, env=environ_for(strategy, 1))
    fine = {"Adafactor-0", "Adafactor-trusted", "RMSprop"}
    assert {name for name, text in said.items() if not text} == fine
    assert "no closure, which LBFGS needs" in said["LBFGS"]
    for name in ("Adagrad", "Adafactor"):
        assert f"would give {name} flat pieces" in said[name]
        assert "deepspeed.zero_stage=0" in said[name]
    assert "one model with one optimizer" in said["two"]
    assert "gradient_clipping" in said["clipping"]


def offloaded() -> dict[str, Any]:
    return token_weights("deepspeed", 2, "fp32")


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=needs("deepspeed")) for stage in (2, 3)])
def test_offload_to_the_cpu_trains_the_same(tmp_path: Path, stage: int) -> None:
    (alone,) = run_ranks(token_weights, 1, "single", 2, "fp32", folder=tmp_path)
    env = environ_for(f"deepspeed-{stage}", 2)
    ranks = run_ranks(
        offloaded, 2, folder=tmp_path, env=lambda rank: {**env(rank), "PHALANX_DEEPSPEED__OFFLOAD": "cpu"}
    )
    for rank in ranks:
        torch.testing.assert_close(rank["weights"], alone["weights"], rtol=1e-5, atol=1e-6)
        assert rank["norm"] == pytest.approx(alone["norm"], rel=1e-4)


def sixteen(run: phalanx.Run, model: nn.Module, **options: Any) -> tuple[Any, Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x = torch.sin(torch.arange(32.0)).reshape(16, 2)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return run.prepare(model, optimizer, DataLoader(data, batch_size=4 // run.world_size))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def left_out(weighted: bool) -> list[Any]:
    """The second step is left out: its gradients are cleared, and must be gone."""
    with phalanx.init(progress=False) as run:
        model, optimizer, loader = sixteen(run, small())
        for number, (x, y) in enumerate(run.steps(loader)):
            run.backward(nn.functional.mse_loss(model(x), y), weight=len(x) * (1 + number) if weighted else None)
            if number != 1:
                norm = run.clip_grad_norm(model, 0.05)
                if norm is None or not 0 < float(norm) < 100:  # as scripts guard a step
                    optimizer.zero_grad()
                    continue
                optimizer.step()
            elif weighted:
                run.clip_grad_norm(model, 0.05)
            optimizer.zero_grad()
        return list(run._session.strategy.saved_model(model).state_dict().values())


def cleared_first(before: bool) -> list[Any]:
    """Gradients cleared at the beginning of each batch or at its end: a group's are whole either way."""
    with phalanx.init(progress=False, accumulate=2) as run:
        model, optimizer, loader = sixteen(run, small())
        for x, y in run.steps(loader):
            with run.accumulate(model):
                if before:
                    optimizer.zero_grad()
                run.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                if not before:
                    optimizer.zero_grad()
        return list(run._session.strategy.saved_model(model).state_dict().values())


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Any, both: bool) -> Any:
        return self.a(x) + (self.b(x) if both else 0.0)


def not_reached() -> list[Any]:
    """The second layer takes part in the first step only; its gradient is zero in the second, not the first's again."""
    with phalanx.init(progress=False) as run:
        torch.manual_seed(0)
        model: Any = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.ones(4, 2)
        model, optimizer, loader = run.prepare(
            model, optimizer, DataLoader(TensorDataset(x, x[:, :1]), batch_size=2 // run.world_size)
        )
        for number, (xb, yb) in enumerate(run.steps(loader)):
            run.backward(nn.functional.mse_loss(model(xb, number == 0), yb))
            optimizer.step()
            optimizer.zero_grad()
        return list(run._session.strategy.saved_model(model).state_dict().values())


def frozen_and_saved() -> list[Any]:
    """A layer that is frozen, in the optimizer's group: it has no state to save."""
    with phalanx.init(progress=False) as run:
        model = small()
        model[0].requires_grad_(False)
        model, optimizer, loader = sixteen(run, model)
        for x, y in run.steps(loader):
            run.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        assert run.save() is not None
        return list(run._session.strategy.saved_model(model).state_dict().values())


def clipped_by_torch() -> list[Any]:
    """torch's own clipping looks at gradients right after the backward pass."""
    with phalanx.init(progress=False) as run:
        model, optimizer, loader = sixteen(run, small())
        for x, y in run.steps(loader):
            run.backward(nn.functional.mse_loss(model(x), y))
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in run.unwrap(model).parameters()]


def slips(strategy: str) -> dict[str, Any]:
    zero = strategy.startswith("deepspeed") and strategy != "deepspeed-0"
    return {
        "left out": left_out(False),
        "left out, weighted": left_out(True),
        "cleared first": cleared_first(True),
        "not reached": not_reached(),
        "frozen": frozen_and_saved(),
        "clipped by torch": None if zero else clipped_by_torch(),
    }


@pytest.mark.parametrize("strategy", [*ENGINES, pytest.param("ddp")])
def test_steps_left_out_and_gradients_cleared_or_clipped_by_hand(tmp_path: Path, strategy: str) -> None:
    if strategy == "ddp":  # the second layer isn't always reached
        chosen: Any = {"PHALANX_STRATEGY": "ddp", "PHALANX_DDP__FIND_UNUSED_PARAMETERS": "true"}
    else:
        chosen = environ_for(strategy, 2)
    (alone,) = run_ranks(slips, 1, "single", folder=tmp_path)
    (whole,) = run_ranks(cleared_first, 1, False, folder=tmp_path)
    torch.testing.assert_close(alone["cleared first"], whole)
    for rank in run_ranks(slips, 2, strategy, folder=tmp_path, env=chosen):
        for name, expected in alone.items():
            if rank[name] is not None:
                torch.testing.assert_close(
                    rank[name], expected, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
                )


def misuse() -> dict[str, str]:
    def part() -> None:
        with phalanx.init(progress=False) as run:
            model, _, loader = sixteen(run, small())
            for x, y in run.steps(loader):
                run.backward(nn.functional.mse_loss(model(x), y))
                run.clip_grad_norm(run.unwrap(model)[0], 1.0)

    def group() -> None:
        with phalanx.init(progress=False) as run:
            _, optimizer, _ = sixteen(run, small())
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    def unfrozen() -> None:
        with phalanx.init(progress=False) as run:
            model = small()
            model[0].requires_grad_(False)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            loader = DataLoader(TensorDataset(torch.ones(4, 2), torch.ones(4, 1)), batch_size=2)
            model, optimizer, loader = run.prepare(model, optimizer, loader)
            run.unwrap(model)[0].requires_grad_(True)
            for _ in run.steps(loader):
                pass

    def half() -> None:
        with phalanx.init(progress=False) as run:
            model = small()
            run.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1))

    def two() -> None:
        with phalanx.init(progress=False) as run:
            first, second = nn.Linear(1, 1), nn.Linear(1, 1)
            run.prepare(first, second, torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1))

    def sparse() -> None:
        with phalanx.init(progress=False) as run:
            model = nn.Embedding(4, 2, sparse=True)
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    said = {}
    for call in (part, group, unfrozen, half, two, sparse):
        try:
            call()
            said[call.__name__] = ""
        except PhalanxError as error:
            said[call.__name__] = str(error)
    return said


@pytest.mark.parametrize("strategy", [pytest.param("deepspeed-2", marks=needs("deepspeed"))])
def test_what_zero_would_train_otherwise_is_refused(tmp_path: Path, strategy: str) -> None:
    (said,) = run_ranks(misuse, 1, folder=tmp_path, env=environ_for(strategy, 1))
    assert "clips the whole model" in said["part"]
    assert "Linear" in said["part"]
    assert "no new groups" in said["group"]
    assert "0.weight, 0.bias became trainable after prepare()" in said["unfrozen"]
    assert "2.weight, 2.bias of the model is trainable, but in no group of SGD" in said["half"]
    assert "parameters of other models" in said["two"]
    assert "sparse=False" in said["sparse"]


def thawed(which: int) -> str:
    """Of two models with the same names, each with a frozen layer."""
    try:
        with phalanx.init(progress=False) as run:
            pair = [small(), small()]
            for model in pair:
                model[0].requires_grad_(False)
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair]
            loader = DataLoader(TensorDataset(torch.ones(2, 2)), batch_size=1)
            *_, loader = run.prepare(*pair, *optimizers, loader)
            pair[which][0].requires_grad_(True)
            for _ in run.steps(loader):
                pass
    except PhalanxError as error:
        return str(error)
    return ""


def misuses() -> tuple[dict[str, str], str, str]:
    return misuse(), thawed(0), thawed(1)


def test_unfreezing_after_prepare_is_refused_where_gradients_would_not_be_averaged(tmp_path: Path) -> None:
    ((said, *two),) = run_ranks(misuses, 1, folder=tmp_path, env={"PHALANX_STRATEGY": "ddp"})
    assert {name for name, text in said.items() if text} == {"unfrozen"}
    assert all("0.weight, 0.bias became trainable after prepare()" in text for text in two)
    (alone,) = run_ranks(misuse, 1, folder=tmp_path, env={"PHALANX_STRATEGY": "single"})
    assert not any(alone.values())
