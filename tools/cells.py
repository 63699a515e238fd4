"""Prints docs/cells.md, which shows which launcher starts which strategy: `python tools/cells.py >docs/cells.md`."""

from __future__ import annotations

import sys

from phalanx.planning.cells import NODES, RUNTIMES, TABLE, Cell
from phalanx.registry import LAUNCHERS, STRATEGIES

HEAD = """\
# Which launcher starts which strategy

This page is made from the table in the code (`phalanx/planning/cells.py`) that the command
itself uses: it refuses the other cells before anything is submitted, and names the nearest one that works.

`1` works on one node, `n` on several; a number is a reason below. The same cells work in a virtual environment and in a
container, as long as the image has the launcher and the engine.

"""

# What is worth saying of a launcher beside its summary in the registry.
LINES = {
    "python": "One process, as `python train.py` is; in a job, as the one task of a Slurm step.",
    "torchrun": "PyTorch's agent, one per node, started by srun (or mpirun); the ranks meet through the agents.",
    "srun": "Slurm starts every rank as a task; they meet at a port that rank 0 keeps. Horovod's ranks get a server of "
    "ours, or MPI by the site's `mpi`.",
    "mpirun": "MPI starts every rank, on the nodes that it knows from Slurm; also on one machine. Horovod must be "
    "built with MPI.",
    "horovodrun": "Horovod's own launcher, with gloo, on one node: it reaches others by ssh only.",
    "deepspeed": "DeepSpeed's own launcher; on several nodes one `deepspeed --no_ssh --node_rank …` each, started by "
    "srun.",
    "ray": "A Ray cluster in the allocation (on one machine: here), in which Ray Train starts the ranks; it ends with "
    "them.",
}


def page() -> str:
    reasons: list[str] = []
    rows = ["| | " + " | ".join(STRATEGIES) + " |", "|---" * (len(STRATEGIES) + 1) + "|"]
    for launcher in LAUNCHERS:
        entries = [_entry(launcher, strategy, reasons) for strategy in STRATEGIES]
        rows.append(f"| **{launcher}** | " + " | ".join(entries) + " |")
    numbered = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    launchers = [f"- **{name}**: {LINES.get(name) or _sentence(entry.summary)}" for name, entry in LAUNCHERS.items()]
    strategies = [f"- **{name}**: {entry.summary}." for name, entry in STRATEGIES.items()]
    parts = [rows, numbered, ["## Launchers", "", *launchers], ["## Strategies", "", *strategies], AUTO.splitlines()]
    return HEAD + "\n\n".join("\n".join(part) for part in parts) + "\n"


def _sentence(summary: str) -> str:
    return f"{summary[:1].upper()}{summary[1:]}."


def _entry(launcher: str, strategy: str, reasons: list[str]) -> str:
    """`1`, `n` or both, and the numbers of the reasons against the others."""
    works, against = [], []
    for nodes, sign in zip(NODES, ("1", "n"), strict=True):
        said = {TABLE[Cell(launcher, strategy, runtime, nodes)] for runtime in RUNTIMES}
        (reason,) = said  # the same in each runtime, as the page says
        if reason is None:
            works.append(sign)
        else:
            reasons += [] if reason in reasons else [reason]
            against.append(f"({reasons.index(reason) + 1})")
    return " ".join([*works, *dict.fromkeys(against)])


AUTO = """\
## What `launcher: auto` chooses

torchrun for ddp, fsdp and deepspeed; python for one process; horovodrun for horovod on one node, and srun on several.
"""

if __name__ == "__main__":
    sys.stdout.buffer.write(page().encode())  # as the page's file is, whatever the terminal's encoding
