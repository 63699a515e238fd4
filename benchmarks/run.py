"""Speed and memory of Phalanx, as ratios and figures of one run: `make bench`.

    python benchmarks/run.py [--json FILE]

Prints a table with each target; the exit code says only whether the benchmarks could run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
HERE = Path(__file__).resolve().parent
# The machine's own settings must not change what is measured.
ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_")}
_CONFIG_HOME = tempfile.TemporaryDirectory()  # a browser writes there too; removed with the process
ENVIRON["XDG_CONFIG_HOME"] = _CONFIG_HOME.name
sys.path.insert(0, str(HERE))

from measuring import look_seconds, step_seconds  # noqa: E402
from report import report_cost  # noqa: E402
from stats import estimate  # noqa: E402
from submission import submission  # noqa: E402


@dataclass(frozen=True)
class Line:
    """One line of the table; `ok` is None where there is no target."""

    what: str
    figure: str
    target: str
    ok: bool | None


def output_of(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=ENVIRON)


def cpu_of(command: list[str]) -> float:
    """CPU seconds, user and system, of a command and what it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    quiet = subprocess.DEVNULL
    subprocess.run(command, check=True, stdout=quiet, stderr=quiet, cwd=ROOT, env=ENVIRON)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def peak_mib_of(command: list[str]) -> float:
    """Largest resident memory of a command, in MiB, asked of a process that starts nothing else."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = output_of([sys.executable, "-c", code, *command])
    return int(done.stdout) / 1024


def imports_torch(command: list[str]) -> bool:
    done = output_of([sys.executable, "-X", "importtime", *command])
    return any(line.rpartition("|")[2].strip() == "torch" for line in done.stderr.splitlines())


def command_line() -> list[Line]:
    """The command's own cost, in turns with torchrun's."""
    phalanx, torchrun, script = str(BIN / "phalanx"), str(BIN / "torchrun"), "examples/digits/train.py"
    plan = ["plan", "--nproc", "2", script]
    large = ["plan", "--json", "-j", "10000x8", "--launcher", "srun", "cpus_per_task=8", script]
    times: dict[str, list[float]] = {"help": [], "torchrun": [], "plan": [], "large": []}
    for _ in range(7):
        times["help"].append(cpu_of([phalanx, "--help"]))
        times["torchrun"].append(cpu_of([torchrun, "--help"]))
        times["plan"].append(cpu_of([phalanx, *plan]))
        times["large"].append(cpu_of([phalanx, *large]))
    median = {name: statistics.median(values) for name, values in times.items()}
    ratio = median["help"] / median["torchrun"]
    memory = peak_mib_of([phalanx, *large])
    torch = [" ".join(words[:1]) for words in (["--help"], plan) if imports_torch(["-m", "phalanx", *words])]
    return [
        Line("phalanx --help, CPU", f"{median['help']:.3f} s", "≤ 0.20 s", median["help"] <= 0.20),
        Line("… as a share of torchrun --help", f"{ratio:.3f}", "≤ 0.100", ratio <= 0.1),
        Line("phalanx plan, CPU", f"{median['plan']:.3f} s", "≤ 0.40 s", median["plan"] <= 0.40),
        Line("of these, import torch", ", ".join(torch) or "none", "none", not torch),
        Line("phalanx plan, 10,000 nodes × 8, CPU", f"{median['large']:.3f} s", "≤ 1 s", median["large"] <= 1),
        Line("… peak memory", f"{memory:.0f} MiB", "≤ 300 MB", memory * 1.048576 <= 300),
    ]


def slurm_jobs() -> list[Line]:
    """Previewing a large job, and submitting many."""
    phalanx, script = str(BIN / "phalanx"), "examples/digits/train.py"
    large = ["submit", "--preview", "-N", "10000", "--gpus-per-node", "8", "--cpus-per-task", "64", script]
    preview = statistics.median(cpu_of([phalanx, *large]) for _ in range(5))
    each = statistics.median(submission(phalanx, ENVIRON) for _ in range(3)) * 1e3
    return [
        Line("phalanx submit --preview, 10,000 nodes × 8, CPU", f"{preview:.3f} s", "≤ 1 s", preview <= 1),
        Line("phalanx submit, a series of 50, CPU a job", f"{each:.1f} ms", "≤ 50 ms", each <= 50),
    ]


def reports() -> list[Line]:
    """A report over many runs, with its page and plots."""
    cpu, _, peak = report_cost(1000, 1_000_000)
    return [
        Line("phalanx report, 1,000 runs with 1,000,000 step records, CPU", f"{cpu:.1f} s", "≤ 8 s", cpu <= 8),
        Line("… peak memory", f"{peak:.0f} MiB", "≤ 1 GB", peak * 1.048576 <= 1000),
    ]


def pages() -> list[Line]:
    """How soon the report's page answers in a browser, in a process of its own: playwright has an event loop."""
    found = json.loads(output_of([sys.executable, str(HERE / "page.py")]).stdout)
    return [
        line
        for name, figures in found.items()
        for line in (
            Line(f"report.html of {name}", f"{figures['megabytes']:.1f} MB", "≤ 5 MB", figures["megabytes"] <= 5),
            Line(
                "… drawn in Chromium after",
                f"{figures['drawn_ms'] / 1000:.2f} s ({figures['cpu_ms'] / 1000:.2f} s of CPU)",
                "≤ 1 s",
                figures["drawn_ms"] <= 1000,
            ),
        )
    ]


def measuring() -> list[Line]:
    """Step records, and looks at the GPU once a second."""
    step, look = step_seconds() / 0.02, look_seconds() / 1.0
    return [
        Line("a step's record, on against off, of a 20 ms step", f"{100 * step:.3f}%", "≤ 0.5%", step <= 0.005),
        Line("a look at the GPU each second, CPU", f"{100 * look:.3f}%", "≤ 0.5%", look <= 0.005),
    ]


def imports() -> list[Line]:
    """What the API costs a script at its start, beside torch and (which loads half of torch) an optimizer."""
    optimizer = "import torch; torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)"
    times: dict[str, list[float]] = {optimizer: [], f"{optimizer}; import phalanx.run": []}
    for _ in range(3):
        for script, seconds in times.items():
            seconds.append(cpu_of([sys.executable, "-c", script]))
    alone, both = (statistics.median(seconds) for seconds in times.values())
    figure = f"{both - alone:.2f} s (torch and an optimizer alone {alone:.2f} s)"
    return [Line("import phalanx.run, CPU", figure, "", None)]


def blocks_of(case: str, ranks: int = 1) -> list[dict[str, float]]:
    """The paired blocks of benchmarks/loops.py, in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "blocks.json"
        start = [sys.executable]
        if ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environ = {**ENVIRON, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [*start, str(HERE / "loops.py"), case, str(out)],
            check=True, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        blocks: list[dict[str, float]] = json.loads(out.read_text())["blocks"]
        return blocks


def overhead(what: str, case: str, target: float | None, ranks: int = 1) -> list[Line]:
    """The API's time over the hand-written loop's, as the median ratio of the blocks."""
    blocks, lines = blocks_of(case, ranks), []
    for clock in ("cpu", "wall"):
        ratios = [block[f"api.{clock}"] / block[f"hand.{clock}"] for block in blocks]
        ratio = estimate(ratios)
        step = statistics.median(block[f"hand.{clock}"] for block in blocks) * 1e3
        figure = f"{ratio.median:.4f} (95%: {ratio.low:.4f} to {ratio.high:.4f}; step {step:.1f} ms)"
        met = None if target is None else ratio.median <= target
        lines.append(Line(f"{what}, {clock}", figure, "" if target is None else f"≤ {target}", met))
    return lines


def empty_step() -> list[Line]:
    """Microseconds that the API adds to a step of a model that does nothing."""
    blocks = blocks_of("empty")
    # On a shared machine all code takes up to twice as long; the loop by hand says when.
    calm = sorted(blocks, key=lambda block: block["hand.cpu"])[: len(blocks) // 4]
    return [
        added("API on an empty model, added CPU a step", blocks, 30),
        added("… in the least disturbed quarter of the blocks", calm, None),
    ]


def added(what: str, blocks: list[dict[str, float]], target: float | None) -> Line:
    extra = estimate([(block["api.cpu"] - block["hand.cpu"]) * 1e6 for block in blocks])
    hand = statistics.median(block["hand.cpu"] for block in blocks) * 1e6
    figure = f"{extra.median:.1f} µs (95%: {extra.low:.1f} to {extra.high:.1f}; by hand {hand:.0f} µs)"
    met = None if target is None else extra.median <= target
    return Line(what, figure, "" if target is None else f"≤ {target} µs", met)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the table there too")
    options = parser.parse_args()
    lines = command_line() + slurm_jobs() + reports() + pages() + measuring() + imports() + empty_step()
    lines += overhead("API / by hand at a 20 ms step", "20ms", 1.01)
    lines += overhead("… with the progress bar drawn", "20ms-drawn", None)
    lines += overhead("… with a dataset class of one's own", "20ms-own-dataset", None)
    lines += overhead("… DDP over gloo in 2 processes", "ddp", None, ranks=2)
    width = max(len(line.what) for line in lines)
    for line in lines:
        verdict = {None: "", True: "ok", False: "MISSED"}[line.ok]
        print(f"{line.what:<{width}}  {line.figure}  {line.target}  {verdict}".rstrip())
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(line) for line in lines], indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
