"""examples/strategies on one machine: each command of its README, as a user types it.

Commands for several nodes are in tests/slurm/test_strategies_tutorial.py.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.errors import PhalanxError
from phalanx.rank import horovod_ranks
from phalanx.rank.topology import Topology
from tests.e2e import tutorial

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HERE, ELSEWHERE, FAILING = "On one machine", ("In an allocation", "As batch jobs"), "What goes wrong"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tutorial")
    tutorial.copy_to(made)
    return made


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["timeout", "--kill-after=5", "240", "bash", "-c", command],  # also a hang must end all ranks
        cwd=folder,
        env=tutorial.environment(folder / "home"),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_the_scripts_code_has_no_word_of_an_engine() -> None:
    code = (tutorial.FOLDER / "train.py").read_text().lower()
    for word in ("ddp", "fsdp", "deepspeed", "horovod", "hvd", "zero_stage", "distributed", "rank ==", "local_rank"):
        assert word not in code, word


def test_no_command_of_the_readme_is_in_a_section_that_is_not_run() -> None:
    with_commands = [name for name in tutorial.sections() if tutorial.commands(name)]
    assert with_commands == [HERE, *ELSEWHERE]
    assert tutorial.commands("") == []
    languages = set(re.findall(r"^```(\w*)$", tutorial.TEXT, re.MULTILINE))
    assert languages == {"", "bash", "text", "error"}  # "" ends a block


@pytest.mark.parametrize("command", tutorial.commands(HERE))
def test_a_command_on_one_machine_trains_to_the_weights_that_the_readme_shows(command: str, folder: Path) -> None:
    tutorial.skip_without_engine(command)
    process = start(command, folder)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    (result,) = tutorial.results(output)  # once, and not of each rank
    expected = tutorial.shown()
    assert result["strategy"] == tutorial.strategy_of(command)
    alone = command.startswith(("python ", "deepspeed train.py"))
    assert (result["ranks"], result["nodes"]) == ("1" if alone else "2", "1")
    assert float(result["checksum"]) == pytest.approx(float(expected["checksum"]), rel=1e-4)
    assert float(result["accuracy"]) == pytest.approx(float(expected["accuracy"]), abs=0.011)


def test_each_mistake_ends_with_the_words_that_the_readme_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tutorial.inline_commands(FAILING)
    for command in wrong:
        tutorial.skip_without_engine(command)
    assert len(wrong) == 4
    said = others(monkeypatch)
    processes = [start(command, folder) for command in wrong]
    for command, process in zip(wrong, processes, strict=True):
        output, _ = process.communicate()
        assert process.returncode not in (0, 124), (command, output)
        said += output
    for text in tutorial.blocks(FAILING, "error"):
        assert text.strip() in said, text


def others(monkeypatch: pytest.MonkeyPatch) -> str:
    """Messages that need a Horovod other than the one that is here, or none."""
    from phalanx.strategies.horovod import Horovod

    two = Topology(0, 2, 0, 2, 0, 1, None, None, "openmpi")
    strategy = Horovod(two, None, None)  # type: ignore[arg-type]
    strategy._hvd = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    monkeypatch.setattr(horovod_ranks, "find_spec", lambda _: None)
    calls = (
        lambda: horovod_ranks.controller(two, {}, frozenset({"gloo"})),
        horovod_ranks.built_with,
        strategy._check_world,
    )
    said = []
    for call in calls:
        with pytest.raises(PhalanxError) as error:
            call()
        said.append(str(error.value))
    return "\n".join(said)
