"""The commands of examples/strategies/README.md, and what each must end with; of another README, with its `text`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples/strategies"
TEXT = (FOLDER / "README.md").read_text(encoding="utf-8")
ENGINES = ("deepspeed", "horovod")
_RESULT = re.compile(
    r"^strategy (?P<strategy>\w+), launcher (?P<launcher>\w+), (?P<ranks>\d+) ranks, (?P<nodes>\d+) nodes\n"
    r"checksum of the weights (?P<checksum>[\d.]+)\n"
    r"test accuracy (?P<accuracy>[\d.]+)$",
    re.MULTILINE,
)
_TAG = re.compile(r"(\[[\d,]+\]<std(?:out|err)>:)")  # of horovodrun, or of the mpirun that it starts


def blocks(section: str, language: str, text: str = TEXT) -> list[str]:
    """The fenced blocks of that language below a heading."""
    return [block for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", part(section, text), re.MULTILINE | re.DOTALL)
            if kind == language]  # fmt: skip


def sections(text: str = TEXT) -> list[str]:
    return re.findall(r"^## (.*)$", text, re.MULTILINE)


def part(section: str, text: str = TEXT) -> str:
    """A section's text; of an empty name, what stands before the first."""
    parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(["", *parts[1::2]], parts[::2], strict=True))[section]


def commands(section: str, text: str = TEXT) -> list[str]:
    """The command lines of a section's shell blocks, each whole."""
    lines = "".join(blocks(section, "bash", text)).replace("\\\n", " ").splitlines()
    return [line.partition("    # ")[0].strip() for line in lines if line.strip()]


def results(output: str) -> list[dict[str, str]]:
    """The last lines of each script in an output."""
    return [found.groupdict() for text in streams(output) for found in _RESULT.finditer(text)]


def streams(output: str) -> list[str]:
    """What each rank wrote to each of its streams: a tag stands before every line, and before every piece of a line
    that the launcher read by itself; pieces of other ranks may lie between."""
    untagged, *parts = _TAG.split(output)
    texts = {"": untagged}
    for tag, text in zip(parts[::2], parts[1::2], strict=True):
        texts[tag] = texts.get(tag, "") + text
    return list(texts.values())


def strategy_of(command: str) -> str:
    found = re.search(r" (?:-s|--dist-strat) (\w+)", command)
    return found[1] if found else "auto"


def skip_without_engine(command: str) -> None:
    """Loud, since what is skipped isn't known to work."""
    for engine in ENGINES:
        if engine in command and find_spec(engine) is None:
            pytest.skip(f"{engine} is not installed: `make engines` does it")


def copy_to(folder: Path) -> None:
    for path in FOLDER.iterdir():
        if path.is_file():
            shutil.copy(path, folder)


def environment(home: Path) -> dict[str, str]:
    """A user's, with the commands of this Python's environment on PATH."""
    ours = ("PHALANX_", "OMP", "SLURM", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "HOROVOD_", "DS_", "PMI")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(ours)}
    return kept | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CONFIG_HOME": str(home),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",  # Open MPI asks root twice
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def inline_commands(section: str) -> list[str]:
    """The commands that stand in a section's sentences."""
    prose = re.sub(r"^```.*?^```$", "", part(section), flags=re.MULTILINE | re.DOTALL)
    return [code for code in re.findall(r"`([^`]+)`", prose) if "train.py" in shlex.split(code)]


def shown() -> dict[str, str]:
    """What the README says that one sees."""
    (found,) = results("".join(blocks("", "text")))
    return found
