"""Images as people pull them, in the real Apptainer: Python and torch, with nothing of Phalanx's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.containers.definition import text as definition
from tests.containers import image, stock
from tests.slurm.train import closed_form
from tests.unit.test_old_pythons import OLDEST, pythons

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TRAIN = Path(__file__).parents[1] / "slurm" / "train.py"

PLAIN = """\
import json, os, sys
import torch, torch.distributed as dist
import images_module
assert images_module.HERE
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
lacking = []
for name in ("pydantic", "yaml", "rich"):
    try:
        __import__(name)
    except ImportError:
        lacking.append(name)
facts = {"total": total.item(), "world": dist.get_world_size(), "lacking": lacking, "python": sys.executable}
facts["path"] = [folder for folder in sys.path if "site-packages" in folder or "phalanx" in folder]
open(os.environ["PHALANX_RUN_DIR"] + "/facts%d.json" % dist.get_rank(), "w").write(json.dumps(facts))
dist.destroy_process_group()
"""


class Project:
    """A user's folder with the job file of that image."""

    def __init__(self, folder: Path, sif: Path, python: Path, *binds: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "job.yaml").write_text(stock.settings(sif, python, *binds))
        (folder / "plain.py").write_text(PLAIN)
        self.environ = {**os.environ, "PATH": image.path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.environ |= {"XDG_CONFIG_HOME": str(folder / "xdg"), "PYTHONDONTWRITEBYTECODE": "1"}
        self.environ |= dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")

    def phalanx(self, *words: object, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "phalanx", *map(str, words)],
            cwd=self.folder, env={**self.environ, **more}, capture_output=True, text=True, timeout=200,
        )  # fmt: skip

    def run(self, *words: object, **more: str) -> subprocess.CompletedProcess[str]:
        return self.phalanx("run", "--local", "-c", "job.yaml", *words, **more)

    def facts(self, name: str) -> list[dict[str, object]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"runs/{name}/*/facts*.json"))]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The image, and its interpreter with pip."""
    image.skip_or_pass()
    folder = tmp_path_factory.mktemp("stock")
    return stock.make(folder), stock.interpreter(folder / "python", ("torch", "numpy", "pip"))


@pytest.fixture
def project(made: tuple[Path, Path], tmp_path: Path) -> Project:
    return Project(tmp_path / "work", *made)


def checked_facts(project: Project, name: str, ranks: int) -> None:
    facts = project.facts(name)
    assert [(fact["total"], fact["world"]) for fact in facts] == [(ranks * (ranks + 1) / 2, ranks)] * ranks
    for fact in facts:
        assert fact["lacking"] == ["pydantic", "yaml", "rich"]
        assert fact["python"] == f"{stock.PLACE}/bin/python3"
        # No folder of the host's packages: this package lies alone in one of its own.
        assert [str(folder).split("/lib")[0] for folder in fact["path"]] == ["/.phalanx", stock.PLACE]


@pytest.mark.parametrize(("launcher", "ranks"), [("torchrun", 2), ("python", 1)])
def test_a_plain_script_runs_in_an_image_with_torch_alone(project: Project, launcher: str, ranks: int) -> None:
    (project.folder / "host").mkdir()
    (project.folder / "host" / "images_module.py").write_text("HERE = False\n")  # the image's own must win
    host = {"PYTHONPATH": f"{project.folder}/host:{os.environ.get('PYTHONPATH', '')}", "VIRTUAL_ENV": "/host"}
    done = project.run("--nproc", ranks, "--launcher", launcher, "plain.py", **host)
    assert done.returncode == 0, done.stderr
    checked_facts(project, "plain", ranks)


def test_a_command_runs_there_too(project: Project) -> None:
    (project.folder / "run.sh").write_text("set -e\nsource ./more.sh\npython3 plain.py\n")
    (project.folder / "more.sh").write_text("export X=1\n")
    done = project.run("training_cmd=bash run.sh", "name=plain")
    assert done.returncode == 0, done.stderr
    checked_facts(project, "plain", 1)


def test_the_api_is_had_by_one_command(project: Project, made: tuple[Path, Path], tmp_path: Path) -> None:
    """Refused before, with that command; then right."""
    refused = project.run("--nproc", "2", TRAIN, "--steps=4")
    assert refused.returncode == 2
    assert f"phalanx container prepare {made[0]}" in refused.stderr
    assert not (project.folder / "runs").exists()
    nothing = project.phalanx("container", "prepare", "-c", "job.yaml", "--wheelhouse", tmp_path / "nix")
    assert nothing.returncode == 2
    assert "pip download --dest" in nothing.stderr
    wheels = stock.wheelhouse(tmp_path / "wheels, x")
    folder = made[0].with_name(f"{made[0].name}.phalanx")
    try:
        done = project.phalanx("container", "prepare", "-c", "job.yaml", "--wheelhouse", wheels)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == str(folder)
        assert (folder / "pydantic").is_dir()
        assert not (folder / "typing_extensions.py").exists()  # the image's own is used
        assert not list(folder.parent.glob(".*.phalanx.*"))
        again = project.phalanx("container", "prepare", "-c", "job.yaml", made[0])
        assert (again.returncode, again.stdout) == (0, "")
        ran = project.run("--nproc", "2", "name=api", TRAIN, "--steps=4")
        assert ran.returncode == 0, ran.stderr
        (weights,) = project.folder.glob("runs/api/*/weights.json")
        found = json.loads(weights.read_text())["weight"]
        assert found == pytest.approx(closed_form(4).flatten().tolist(), rel=1e-5)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_an_image_without_pip_gets_them_from_this_machines(made: tuple[Path, Path], tmp_path: Path) -> None:
    project = Project(tmp_path / "work", made[0], stock.interpreter(tmp_path / "bare", ("typing_extensions",)))
    (project.folder / "settings.py").write_text(SETTINGS)
    own = f"container.packages={tmp_path}/beside"
    words = ["container", "prepare", "-c", "job.yaml", own, "--wheelhouse", stock.wheelhouse(tmp_path / "wheels")]
    done = project.phalanx(*words)
    assert done.returncode == 0, done.stderr
    ran = project.run(own, "settings.py")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[-2:] == ["3", "/.phalanx/packages/pydantic/__init__.py"]


SETTINGS = """\
import sys
from phalanx.config import load_config
import pydantic
config = load_config(["job.yaml"], ["nodes=3"], {}).config
print("%d.%d" % sys.version_info[:2], config.nodes, pydantic.__file__)
"""


def interpreter(minor: int) -> tuple[str, str]:
    """A Python of that minor that has nothing of ours, and the folder that it is installed in."""
    where = "import os, sys; print(os.path.realpath(sys.executable), sys.base_prefix)"
    words = [pythons()[minor], "-c", where]
    python, prefix = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    return python, prefix


def test_an_image_with_the_oldest_python_runs_plain_scripts(made: tuple[Path, Path], tmp_path: Path) -> None:
    if OLDEST not in pythons():
        pytest.skip(f"NOT TESTED in an image with Python 3.{OLDEST}: no such interpreter on PATH or in pyenv")
    python, prefix = interpreter(OLDEST)
    project = Project(tmp_path / "work", *made, f"{prefix}:{prefix}:ro")
    (project.folder / "plain.py").write_text("import os, sys\nprint(sys.version_info[1], os.environ['WORLD_SIZE'])\n")
    done = project.run(f"python={python}", "plain.py")
    assert (done.returncode, done.stdout) == (0, f"{OLDEST} 1\n"), done.stderr
    (project.folder / "settings.py").write_text(SETTINGS)
    refused = project.run(f"python={python}", "settings.py")
    assert refused.returncode == 2
    assert "3.10 or newer" in refused.stderr


def test_an_image_of_another_minor_gets_the_apis_packages(made: tuple[Path, Path], tmp_path: Path) -> None:
    others = [minor for minor in pythons() if minor >= 10 and minor != sys.version_info[1]]
    if not others:
        pytest.skip("NOT TESTED: no other Python from 3.10 on PATH or in pyenv")
    python, prefix = interpreter(max(others))
    wheels = tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", str(wheels)]
    pip += ["--python-version", f"3.{max(others)}", "pydantic>=2.7", "PyYAML>=6.0", "rich>=13.0"]
    got = subprocess.run(pip, capture_output=True, text=True)
    if got.returncode != 0:
        pytest.skip(f"NOT TESTED with Python 3.{max(others)}: no wheels for it to be had ({got.stderr.strip()[-200:]})")
    project = Project(tmp_path / "work", *made, f"{prefix}:{prefix}:ro")
    (project.folder / "settings.py").write_text(SETTINGS)
    own = (f"python={python}", f"container.packages={tmp_path}/beside")
    done = project.phalanx("container", "prepare", "-c", "job.yaml", *own, "--wheelhouse", wheels)
    assert done.returncode == 0, done.stderr
    ran = project.run(*own, "settings.py")
    assert ran.stdout.split() == [f"3.{max(others)}", "3", "/.phalanx/packages/pydantic/__init__.py"], ran.stderr
    misfit = project.run("container.packages=" + str(tmp_path / "beside"), "settings.py")  # the image's own Python
    assert misfit.returncode == 2
    assert "doesn't fit" in misfit.stderr


@pytest.mark.parametrize("launcher", ["deepspeed", "horovodrun", "ray"])
def test_a_launcher_that_the_image_lacks_is_refused(project: Project, launcher: str) -> None:
    done = project.run("--nproc", "2", "--launcher", launcher, "plain.py")
    assert done.returncode == 2
    assert f"holds no {launcher.removesuffix('run')} for python3" in done.stderr
    assert not (project.folder / "runs").exists()


def test_packages_of_a_mounted_home_are_not_the_images(made: tuple[Path, Path], tmp_path: Path) -> None:
    """A Python that is no virtual environment's, as images have it, looks there by itself."""
    version = subprocess.run(["/usr/bin/python3", "--version"], capture_output=True, text=True).stdout.split()[-1]
    stale = tmp_path / "home/.local/lib" / f"python{version.rpartition('.')[0]}" / "site-packages"
    stale.mkdir(parents=True)
    (stale / "stale.py").write_text("")
    project = Project(tmp_path / "work", *made)
    (project.folder / "job.yaml").write_text((project.folder / "job.yaml").read_text() + "python: /usr/bin/python3\n")
    (project.folder / "stale_too.py").write_text("import stale\n")
    words = (f"container.home={tmp_path}/home", "stale_too.py")
    done = project.run(*words)
    assert done.returncode == 1
    assert "No module named 'stale'" in done.stderr
    wanted = project.run("env.PYTHONNOUSERSITE=", *words)
    assert wanted.returncode == 0, wanted.stderr


def test_lines_before_that_fail_end_the_launch(project: Project) -> None:
    (project.folder / "activate").write_text("export images_own=1\n")
    (project.folder / "see.py").write_text(
        "import os\nassert os.environ['images_own'] == '1'\nopen('ran', 'w').close()\n"
    )
    done = project.run("container.pre=source ./activate", "see.py")
    assert done.returncode == 0, done.stderr
    (project.folder / "ran").unlink()
    failed = project.run("container.pre=source env/bin/activate", "see.py")
    assert failed.returncode != 0
    assert "container.pre ended with exit code" in failed.stderr
    assert not (project.folder / "ran").exists()


def test_apptainer_finds_what_a_definition_starts_from(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Without %post, for which a made-up image has no shell."""
    environ = {**os.environ, "PATH": image.path(), "APPTAINER_CACHEDIR": str(tmp_path / "cache")}
    with image.registry("lab/tiny", image.FILES) as uri:
        for number, base in enumerate((uri, str(made[0]))):
            (tmp_path / "x.def").write_text(definition(base, (), None).partition("%files")[0])
            words = ["apptainer", "build", "--no-https", str(tmp_path / f"{number}.sif"), str(tmp_path / "x.def")]
            done = subprocess.run(words, env=environ, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
