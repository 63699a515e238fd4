"""Real scripts by every way to start them: the digits example, scripts of other libraries, runs that break off."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from phalanx.records import Epoch, Exit, Record, Resume, Start, Step, read_file, read_records
from tests.e2e.tools import Done, command, in_terminal, phalanx, read_all, run_dirs, start, wait_for

pytestmark = pytest.mark.slow

HOST = platform.node()
DIGITS = Path(__file__).parents[2] / "examples/digits/train.py"
EPOCHS, STEPS = 3, 135  # of 45 steps of 32 images over all ranks
TWO = ("--nproc-per-node", "2")
FORMS: dict[str, tuple[list[str], int]] = {
    "python": ([sys.executable], 1),
    "phalanx run": (command(), 1),
    "torchrun": ([str(Path(sys.executable).with_name("torchrun")), *TWO], 2),
    "torch.distributed.launch": ([sys.executable, "-m", "torch.distributed.launch", *TWO], 2),
    "phalanx run --nproc 2": (command("--nproc", "2"), 2),
}
VARIANT = {
    "nn.Dropout(0.2)": "nn.Dropout(0.0)",
    "dtype=torch.float32": "dtype=torch.float64",
    "\nimport phalanx\n": "\nimport phalanx\ntorch.set_default_dtype(torch.float64)\n",
}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass
class Trained:
    world_size: int
    done: Done
    run_dir: Path

    def weights(self, folder: Path) -> dict[str, torch.Tensor]:
        dcp_to_torch_save(self.run_dir / "checkpoints" / str(STEPS), folder / "all.pt")
        return {key: value for key, value in torch.load(folder / "all.pt").items() if key.startswith("model.")}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """The digits by one of FORMS, run when first asked for.

    Without dropout, whose masks differ by rank, and in float64, as float32's rounding would be magnified.
    """
    source = DIGITS.read_text()
    for old, new in VARIANT.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PHALANX_", "OMP_"))}
    own |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PHALANX_CHECKPOINT__EVERY_STEPS": str(STEPS)}

    @cache
    def trained(form: str) -> Trained:
        work = tmp_path_factory.mktemp("digits")
        (work / "train.py").write_text(source)
        words, world_size = FORMS[form]
        arguments = ["--epochs", str(EPOCHS), "--lr", "5e-3", "--batch-size", str(32 // world_size)]
        done = start(*words, "train.py", *arguments, cwd=work, env={**own, "XDG_CONFIG_HOME": str(work)})
        assert done.returncode == 0, done.stderr
        (run_dir,) = run_dirs(work, "train")
        return Trained(world_size, done, run_dir)

    return trained


@pytest.mark.parametrize("form", FORMS)
def test_the_same_file_trains_the_same_model(form: str, digits: Callable[[str], Trained], tmp_path: Path) -> None:
    trained = digits(form)
    *_, place, result = trained.done.stdout.splitlines()
    assert place == f"run directory {trained.run_dir}"
    assert re.fullmatch(r"test accuracy 0\.\d{4}", result)
    assert float(result.split()[-1]) >= 0.97
    mine, alone = trained.weights(tmp_path), digits("python").weights(tmp_path)
    assert mine.keys() == alone.keys()
    for name, weight in alone.items():
        torch.testing.assert_close(mine[name], weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_without_a_terminal_output_is_plain_and_without_warnings(form: str, digits: Callable[[str], Trained]) -> None:
    """Python's warnings, torch's and those of its C++ parts, on each rank; a launcher's own are not ours."""
    trained = digits(form)
    done, ranks = trained.done, range(trained.world_size)
    logs = [(trained.run_dir / f"logs/{rank}.log").read_text() for rank in ranks]
    assert not CONTROL.search(done.stdout + done.stderr + "".join(logs))
    for line in "".join(logs).splitlines():
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO ", line)
    if form.startswith(("python", "phalanx")):
        assert all(line.startswith(("phalanx: ", "run directory: ")) for line in done.stderr.splitlines())
    assert ("Warning" in done.stderr) == (form == "torch.distributed.launch")  # it is deprecated


@pytest.mark.parametrize("form", FORMS)
def test_each_rank_logs_who_it_is_and_how_long_it_took(form: str, digits: Callable[[str], Trained]) -> None:
    trained = digits(form)
    texts = [(trained.run_dir / f"logs/{rank}.log").read_text() for rank in range(trained.world_size)]
    for rank, text in enumerate([*texts, trained.done.stderr]):
        rank %= trained.world_size  # the terminal shows the main rank's
        identities = re.findall(r"rank (\d+) of (\d+) on (\S+): ", text)
        assert identities == [(str(rank), str(trained.world_size), HOST)]
        ((ended, seconds, step),) = re.findall(r"rank (\d+) done after (\S+) s, step (\d+)$", text, re.MULTILINE)
        assert (int(ended), int(step)) == (rank, STEPS)
        assert 0 < float(seconds) < trained.done.seconds


# Scripts without the API. Each takes one step of gradient descent for y = 2x from weight 0 over x = 0 … 7.

PLAIN = """
import json, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.arange(8.0)[rank::world]
weight = torch.zeros((), requires_grad=True)
((weight * x - 2 * x) ** 2).mean().backward()
dist.all_reduce(weight.grad)
print(json.dumps([world, rank, 0 - 0.01 * weight.grad.item() / world]))
dist.destroy_process_group()
"""
ACCELERATE = """
import json, torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
accelerator = Accelerator()
world = accelerator.num_processes
x = torch.arange(8.0).reshape(8, 1)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, 2 * x), batch_size=8 // world)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for a, b in loader:
    accelerator.backward(((model(a) - b) ** 2).mean())
    optimizer.step()
ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
assert ranks == list(range(world)), ranks
print(json.dumps([world, accelerator.process_index, accelerator.unwrap_model(model).weight.item()]))
accelerator.end_training()
"""
LIGHTNING = """
import json, sys, torch, lightning
from torch.utils.data import DataLoader, TensorDataset

class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)

    def training_step(self, batch):
        return ((self.layer(batch[0]) - batch[1]) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

world = int(sys.argv[1])
x = torch.arange(8.0).reshape(8, 1)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
strategy = "ddp" if world > 1 else "auto"
trainer = lightning.Trainer(accelerator="cpu", devices=world, strategy=strategy, max_epochs=1, **quiet)
model = Line()
trainer.fit(model, DataLoader(TensorDataset(x, 2 * x), batch_size=8 // world))
print(json.dumps([trainer.world_size, trainer.global_rank, model.layer.weight.item()]))
"""


SCRIPTS = {"plain": PLAIN, "accelerate": ACCELERATE, "lightning": LIGHTNING}


@pytest.mark.parametrize(
    ("script", "world_size"),
    # Plain torch in two processes is in test_run_command.
    [("plain", 1), ("accelerate", 1), ("accelerate", 2), ("lightning", 1), ("lightning", 2)],
)
def test_a_script_without_the_api_trains(work: Path, script: str, world_size: int) -> None:
    (work / "s.py").write_text(SCRIPTS[script])
    done = phalanx("--nproc", str(world_size), "s.py", str(world_size))
    assert done.returncode == 0, done.stderr
    (run_dir,) = run_dirs(work)
    logs = [(run_dir / f"logs/{rank}.log").read_text() for rank in range(1, world_size)]
    for rank, output in enumerate([done.stdout, *logs]):
        # Where DeepSpeed is installed, Accelerate imports it, and it says something in brackets of its own.
        (answer,) = [json.loads(line) for line in output.splitlines() if re.match(r"\[\d, ", line)]
        # The gradient is mean(-4x²) = -70.
        assert answer == [world_size, rank, pytest.approx(0.7)]


# In a terminal.


def drawn(output: str) -> list[list[str]]:
    """A terminal's lines, each with all its states: new ones begin where it is erased or gone over again."""
    lines, row = [[""]], 0
    for word in re.findall(r"\x1b\[[?\d;]*[a-zA-Z]|\r|\n|[^\x1b\r\n]+", output.replace("\r\n", "\n")):
        if word == "\n":
            row += 1
            lines += [[""]] if row == len(lines) else []
        elif word == "\x1b[1A":
            row -= 1
        elif word in ("\r", "\x1b[2K"):
            lines[row].append("")
        elif not word.startswith("\x1b"):  # colours and the cursor
            lines[row][-1] += word
    return lines


def bars(output: str) -> list[str]:
    """All states of the progress bar, without the bar itself."""
    states = [state for line in drawn(output) for state in line if re.match(r"epoch \d+ \W", state)]
    return [re.sub(r" \W+ ", " ", state) for state in states]


def test_in_a_terminal_a_bar_is_drawn_and_whole_lines_are_left(work: Path) -> None:
    process, terminal = in_terminal(command(str(DIGITS), "--epochs", "2", "--batch-size", "32"))
    shown = read_all(terminal)
    assert process.wait(timeout=60) == 0
    (run_dir,) = run_dirs(work, "train")
    steps = [state.rsplit(" ", 1)[0] for state in bars(shown)]  # without the time that is left
    assert steps[0] == "epoch 0 0/45"
    assert steps[-1] == "epoch 1 45/45"
    assert {"epoch 0 45/45", "epoch 1 0/45"} < set(steps)
    patterns = [
        rf"run directory: {run_dir}",
        rf"phalanx: rank 0 of 1 on {HOST}: .*",
        r"phalanx: epoch 0 done: 45 steps in \S+ s",
        r"phalanx: epoch 1 done: 45 steps in \S+ s",
        r"phalanx: rank 0 done after \S+ s, step 90",
        rf"run directory {run_dir}",
        r"test accuracy 0\.\d{4}",
        "",
    ]
    lines = [line[-1] for line in drawn(shown)]
    assert len(lines) == len(patterns), lines
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)


FAILING = """
import time, torch, phalanx
from phalanx.errors import DataError
from torch.utils.data import DataLoader

try:
    with phalanx.init() as run:
        try:
            run.prepare(DataLoader(range(1), shuffle=True))
        except DataError as error:
            run.print(error, all_ranks=True)
        for batch in run.steps(run.prepare(DataLoader(range(64), batch_size=2, shuffle=True))):
            if run.rank == 1 and run.step == 5:
                print(time.time(), file=open("failed_at", "w"))
                raise ValueError("bad sample 17")
            run.reduce(batch.sum())
finally:
    time.sleep(2 * run.rank)  # the rank that waits for this one has time to hear of it and to end
"""


def test_a_rank_that_raises_while_others_wait_for_it_is_the_one_that_is_named(work: Path) -> None:
    """Though the others fail as well, and may be quicker to end."""
    (work / "s.py").write_text(FAILING)
    process, terminal = in_terminal(command("--nproc", "2", "s.py"))
    shown = read_all(terminal)
    assert process.wait(timeout=60) == 1
    assert time.time() - float((work / "failed_at").read_text()) < 20
    (run_dir,) = run_dirs(work)
    assert [line[-1] for line in drawn(shown)][-4:] == [
        f"rank 1 on {HOST} failed: ValueError: bad sample 17",
        f"  log: {run_dir / 'logs/1.log'}",
        f"  traceback: {run_dir / 'errors/1.json'}",
        "",
    ]
    log = (run_dir / "logs/1.log").read_text()
    assert "rank 1 failed after" in log
    assert 'raise ValueError("bad sample 17")' in log
    assert bars(shown)[0].startswith("epoch 0 0/16 ")
    assert not CONTROL.search(log)  # the bar is the main rank's alone
    too_few = "the training data has 1 samples, fewer than the 2 ranks"
    assert f"[rank 0] {too_few}" in shown
    assert f"[rank 1] {too_few}" in log
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")  # the cursor is not left hidden
    records = read_records(run_dir)
    for rank in (0, 1):
        assert [r.step for r in of_rank(records, rank) if isinstance(r, Step)] == [1, 2, 3, 4, 5]
    (last,) = [record for record in of_rank(records, 1) if isinstance(record, Exit)]
    assert last.exception == "ValueError: bad sample 17"


# Breaking off and going on.


def of_rank(records: list[Record], rank: int) -> list[Record]:
    return [record for record in records if record.rank == rank]


def saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in run_dir.glob("checkpoints/*") if path.name.isdigit())


def break_off(work: Path, words: list[str], step: int, kill: Callable[[subprocess.Popen[str], Path], None]) -> str:
    """Start, `kill` once there is a checkpoint at `step` or later, and return the last of stderr."""
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    wait_for(lambda: any(max(saved(path), default=0) >= step for path in work.glob("runs/train/*")))
    (run_dir,) = run_dirs(work, "train")
    kill(process, run_dir)
    _, said = process.communicate(timeout=60)
    return f"{said.rstrip()}\nexit code {process.returncode}"


def kill_rank_1(_: subprocess.Popen[str], run_dir: Path) -> None:
    (began,) = [record for record in read_file(run_dir / "records/1.1.jsonl") if isinstance(record, Start)]
    os.kill(began.pid, signal.SIGKILL)


def interrupt(process: subprocess.Popen[str], _: Path) -> None:
    process.send_signal(signal.SIGINT)


def test_a_run_that_broke_off_goes_on_where_it_was_saved(work: Path) -> None:
    """Killed in two processes, interrupted in one, and ended in two; each image is trained on once an epoch."""
    script = [str(DIGITS), "--epochs", "3", "--batch-size"]
    often = ("--checkpoint.every-steps", "10")
    first = break_off(work, command("--nproc", "2", *often, *script, "16"), 30, kill_rank_1)
    assert re.search(rf"^rank 1 on {HOST} was killed by SIGKILL.*\n  log: .*\nexit code 137$", first, re.MULTILINE)
    (run_dir,) = run_dirs(work, "train")
    one = saved(run_dir)[-1]
    resumed = command("--resume", "latest", "--nproc", "1", *often, *script, "32")
    second = break_off(work, resumed, one + 30, interrupt)
    assert second.endswith("stopped by SIGINT\nexit code 130")
    assert f"resumed from {run_dir / 'checkpoints' / str(one)}: step {one}, epoch {(one - 1) // 45}" in second
    two = saved(run_dir)[-1]
    done = phalanx("--resume", "latest", "--nproc", "2", *often, *script, "16")
    assert done.returncode == 0, done.stderr
    assert f"resumed from {run_dir / 'checkpoints' / str(two)}: step {two}, epoch {(two - 1) // 45}" in done.stderr
    assert re.search(r"\ntest accuracy 0\.9\d+\n$", done.stdout)
    assert "Warning" not in first + second + done.stderr

    records = read_records(run_dir)
    main = of_rank(records, 0)
    assert [(r.attempt, r.step) for r in main if isinstance(r, Resume)] == [(2, one), (3, two)]
    assert [r.step for r in main if isinstance(r, Step)] == list(range(1, 136))
    assert [(r.epoch, r.step) for r in main if isinstance(r, Epoch)] == [(0, 45), (1, 90), (2, 135)]
    assert {r.attempt for r in main if isinstance(r, Step) and r.step > two} == {3}
    for epoch in range(3):
        steps = [record for record in records if isinstance(record, Step) and record.epoch == epoch]
        assert sum(record.samples for record in steps) == 1437
    assert saved(run_dir) == [110, 120, 130]
