"""Runs in the real Apptainer on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers import image

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FACTS = """\
import json, os, sys
rank = os.environ["RANK"]
facts = {name: os.environ.get(name) for name in ("WORLD_SIZE", "MY_A", "OTHER", "APPTAINER_CONTAINER")}
facts |= {"arguments": sys.argv[1:], "cwd": os.getcwd()}
open(os.environ["PHALANX_RUN_DIR"] + f"/facts{rank}.json", "w").write(json.dumps(facts))
"""


class Here:
    def __init__(self, folder: Path, sif: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "job.yaml").write_text(image.settings(sif))
        (folder / "facts.py").write_text(FACTS)
        self.environ = {**os.environ, "PATH": image.path(), "OTHER": "host", "OMP_NUM_THREADS": "1"}
        self.environ |= {"XDG_CONFIG_HOME": str(folder / "xdg"), "CUDA_VISIBLE_DEVICES": ""}

    def words(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "phalanx", *words]

    def phalanx(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(*words),
            cwd=self.folder,
            env={**self.environ, **more},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.phalanx("run", "--local", "-c", "job.yaml", *words)

    def facts(self, rank: int = 0) -> dict[str, str]:
        (path,) = self.folder.glob(f"runs/*/*/facts{rank}.json")
        return json.loads(path.read_text())


@pytest.fixture(scope="module")
def sif(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    image.skip_or_pass()
    return image.make(tmp_path_factory.mktemp("image"))


@pytest.fixture
def here(sif: Path, tmp_path: Path) -> Here:
    return Here(tmp_path / "work", sif)


@pytest.mark.parametrize("clean", ["false", "true"])
def test_ranks_run_inside_with_their_variables(here: Here, clean: str) -> None:
    odd = 'it\'s "$HOME", `id` [x]'
    more = (f"container.clean_env={clean}", f"container.args={'--contain' if clean == 'true' else ''}")
    done = here.run("--nproc", "2", *more, f"env.MY_A={odd}", "facts.py", "a b", "$HOME,x")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        facts = here.facts(rank)
        assert facts["APPTAINER_CONTAINER"].endswith("tiny.sif")
        assert (facts["WORLD_SIZE"], facts["MY_A"]) == ("2", odd)
        assert facts["arguments"] == ["a b", "$HOME,x"]
        assert facts["cwd"] == str(here.folder)
        assert (facts["OTHER"] is None) == (clean == "true")


def test_the_digits_of_a_model_are_the_same_inside_and_outside(here: Here) -> None:
    script = Path(__file__).parent.parent / "slurm" / "train.py"
    for runtime in ("apptainer", "venv"):
        done = here.run("--runtime", runtime, "--nproc", "2", f"name={runtime}", str(script), "--steps=4")
        assert done.returncode == 0, done.stderr
    inside, outside = (
        json.loads(next(here.folder.glob(f"runs/{name}/*/weights.json")).read_text()) for name in ("apptainer", "venv")
    )
    assert inside == outside


def test_one_variable_switches_the_container_off(here: Here) -> None:
    done = here.phalanx("run", "--local", "-c", "job.yaml", "facts.py", USE_CONTAINER="0")
    assert done.returncode == 0, done.stderr
    assert here.facts()["APPTAINER_CONTAINER"] is None


def test_the_scripts_exit_code_is_the_commands(here: Here) -> None:
    (here.folder / "seven.py").write_text("import sys; sys.exit(7)\n")
    done = here.run("seven.py")
    assert done.returncode == 7
    assert "rank 0" in done.stderr
    assert "SystemExit: 7" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_script(here: Here, number: signal.Signals) -> None:
    (here.folder / "wait.py").write_text(
        "import os, signal, sys, time\n"
        "def end(number, _):\n"
        "    open('got', 'w').write(str(number)); sys.exit(3)\n"
        f"signal.signal({int(number)}, end)\n"
        "open('ready', 'w').close()\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        here.words("run", "--local", "-c", "job.yaml", "wait.py"),
        cwd=here.folder,
        env=here.environ,
        stderr=subprocess.PIPE,
    )
    limit = time.monotonic() + 60
    while not (here.folder / "ready").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert (here.folder / "got").read_text() == str(int(number))


def test_folders_with_odd_names_are_bound(sif: Path, tmp_path: Path) -> None:
    here = Here(tmp_path / "a,b c:d", sif)
    (here.folder / "data,x:y").mkdir()
    (here.folder / "data,x:y" / "file").write_text("here")
    (here.folder / "read.py").write_text("import sys; sys.exit(open('/mnt/file').read() != 'here')\n")
    bind = str(here.folder / "data,x:y").replace(",", "\\,").replace(":", "\\:") + ":/mnt:ro"
    text = (here.folder / "job.yaml").read_text()
    (here.folder / "job.yaml").write_text(text.replace("binds: [", f"binds: [{json.dumps(bind)}, "))
    done = here.run("read.py")
    assert done.returncode == 0, done.stderr


def test_the_images_root_is_read_only(here: Here) -> None:
    (here.folder / "write.py").write_text("open('/opt/x', 'w')\n")
    done = here.run("write.py")
    assert done.returncode == 1
    assert "Read-only file system" in done.stderr


def test_a_missing_image_or_bind_is_said_before_anything_is_written(here: Here) -> None:
    for words in (["container.image=nix.sif"], ["container.binds=/nix"]):
        done = here.run(*words, "facts.py")
        assert done.returncode == 2
        assert "nix" in done.stderr
    assert not (here.folder / "runs").exists()


def test_an_image_is_pulled_once_from_a_registry_to_a_file(here: Here, tmp_path: Path) -> None:
    files = {**image.FILES, "made-here": "yes"}
    with image.registry("lab/tiny", files) as uri:
        words = ["container", "pull", uri, "pulled.sif", "--args=--no-https", f"container.cache={tmp_path}/cache"]
        done = here.phalanx(*words)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "pulled.sif"
        again = here.phalanx(*words)
        assert again.returncode == 2
        assert "exists" in again.stderr
    listed = subprocess.run(
        ["apptainer", "sif", "list", str(here.folder / "pulled.sif")], env=here.environ, capture_output=True, text=True
    )
    assert listed.returncode == 0, listed.stderr
    refused = here.phalanx("container", "pull", "docker://127.0.0.1:1/none:1", "none.sif", "--args=--no-https")
    assert refused.returncode not in (0, 2)
    assert sorted(path.name for path in here.folder.glob("*.sif*")) == ["pulled.sif"]


def test_an_image_is_built_from_a_definition(here: Here, sif: Path) -> None:
    (here.folder / "x.def").write_text(f"Bootstrap: localimage\nFrom: {sif}\n%labels\n    a b\n")
    done = here.phalanx("container", "build", "x.def", "built.sif", f"container.tmp={here.folder}")
    assert done.returncode == 0, done.stderr
    assert (here.folder / "built.sif").stat().st_size > 1000
