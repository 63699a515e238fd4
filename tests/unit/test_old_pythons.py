"""What runs in the ranks of a stock image: nothing but the standard library, from Python 3.8 on."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import phalanx
from phalanx.bound import REQUIREMENTS

SOURCE = Path(phalanx.__file__).parent
ROOT = SOURCE.parents[1]
OLDEST, NEWEST = 8, 13
# Names of the standard library that came after Python 3.8, as far as files like these may want them.
NEWER = {
    *("removeprefix", "removesuffix", "is_relative_to", "with_stem", "readlink", "hardlink_to", "walk", "bit_count"),
    *("pairwise", "batched", "cache", "lcm", "nextafter", "randbytes", "TypeAlias", "ParamSpec"),
    *("Self", "StrEnum", "ExceptionGroup", "aiter", "anext", "stdlib_module_names", "orig_argv", "add_note", "chdir"),
    *("unparse", "waitstatus_to_exitcode", "pidfd_open", "to_thread", "packages_distributions", "tomllib"),
}
NEWER_OPTIONS = {"strict", "kw_only", "slots", "delete_on_close", "process_group", "pipesize"}


def imported_files(module: str) -> dict[str, ast.Module]:
    """The module and all of this package that it imports, at any time: by reading, not by running."""
    found: dict[str, ast.Module] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = path_of(name)
        if name in found or not path.is_file():
            continue
        found[name] = ast.parse(path.read_bytes())
        for node in ast.walk(found[name]):
            if isinstance(node, ast.ImportFrom) and node.level:
                package = name.split(".")[: -node.level]
                named = [node.module] if node.module else [alias.name for alias in node.names]
                assert package or node.module, f"{name} imports the package itself"
                waiting += [".".join([*package, one]) for one in named]
    return found


def path_of(module: str) -> Path:
    return SOURCE.joinpath(*module.split(".")).with_suffix(".py")


FILES = imported_files("worker") | imported_files("bound")


def evaluated(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but annotations, which are left as text, and type checkers' imports."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        yield node
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns"):
                items = value if isinstance(value, list) else [value]
                waiting += [item for item in items if isinstance(item, ast.AST)]


@cache
def pythons() -> dict[int, str]:
    """The interpreters on PATH, and those that pyenv keeps, by their minor version."""
    found = {}
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for minor in range(OLDEST, NEWEST + 1):
        names = [*map(str, kept.glob(f"3.{minor}.*/bin/python3")), shutil.which(f"python3.{minor}")]
        for name in filter(None, names):
            code = "import sys; print(sys.version_info[1])"
            words = [name, "-c", code]
            done = subprocess.run(words, capture_output=True, text=True, cwd="/", check=False)
            if done.stdout.strip() == str(minor):  # pyenv's own names may lead to none
                found[minor] = name
                break
    return found


def test_the_closure_is_that_of_the_worker() -> None:
    parts = ("entry", "launch_variables", "topology", "rendezvous", "horovod_ranks", "hostlist", "ports")
    assert {"worker", *(f"rank.{part}" for part in parts)} <= set(FILES)
    assert not {name.split(".")[0] for name in FILES} & {"config", "registry", "records", "planning"}


@pytest.mark.parametrize("name", sorted(FILES))
def test_ranks_files_are_written_for_python_3_8(name: str) -> None:
    text = path_of(name).read_text(encoding="utf-8")
    tree = ast.parse(text, feature_version=(3, OLDEST))
    future = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    assert future or not any(isinstance(node, ast.AnnAssign) for node in ast.walk(tree))
    for node in evaluated(tree):
        where = f"{name}.py:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            flags = {getattr(getattr(side, "value", None), "id", None) for side in (node.left, node.right)}
            assert flags & {"os", "re", "select", "socket", "stat"}, f"{where}: dicts and types have no | in 3.8"
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr):
            pytest.fail(f"{where}: |= of dicts came with 3.9")
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            assert node.value.id not in ("dict", "list", "tuple", "set", "type"), f"{where}: subscripted at run time"
        if isinstance(node, (ast.Attribute, ast.alias)):
            word = node.attr if isinstance(node, ast.Attribute) else node.name
            assert word not in NEWER, f"{where}: {word} came after 3.8"
        if isinstance(node, ast.Call):
            assert not NEWER_OPTIONS & {word.arg for word in node.keywords}, f"{where}: an option that 3.8 lacks"


def test_ranks_import_the_standard_library_alone(tmp_path: Path) -> None:
    """In a process without any other packages, with what a worker imports late, and what is Ray's agent."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "import phalanx.rank.rendezvous, phalanx.rank.horovod_ranks, phalanx.worker, phalanx.script.epoch_timer\n"
        "import phalanx.ray_launch.agent, phalanx.ray_launch.driver\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE.parent), "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-S", "-m", "phalanx.worker", str(script)], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    others = set(json.loads(done.stdout)) - set(sys.stdlib_module_names) - {"__main__", "phalanx"}
    assert not others


def test_the_api_needs_what_the_package_says_that_it_needs() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = text.partition("\ndependencies = [")[2].partition("]")[0]
    assert [word.strip().strip('"') for word in declared.split(",") if word.strip()] == list(REQUIREMENTS)


def test_no_python_from_3_8_is_left_out_without_a_word() -> None:
    missing = [f"3.{minor}" for minor in range(OLDEST, NEWEST + 1) if minor not in pythons()]
    if missing:
        pytest.skip(f"NOT TESTED with Python {', '.join(missing)}: no such interpreter on PATH or in pyenv")


SCRIPT = """\
import os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
here = pathlib.Path(os.environ["PHALANX_RUN_DIR"])
(here / ("seen" + os.environ["RANK"])).write_text(" ".join([*sys.argv[1:], *map(os.environ.get, names)]))
port = os.environ["MASTER_PORT"]
(here / ("port" + os.environ["RANK"])).write_text(port)
if sys.argv[1:] == ["fail"]:
    raise ValueError("on purpose")
"""


@pytest.mark.parametrize("minor", range(OLDEST, NEWEST + 1))
def test_the_worker_runs_a_script_under_each_python(minor: int, tmp_path: Path) -> None:
    """Two ranks of srun, which meet by the rendezvous file; one that fails, with its report; a command; wrong words."""
    python = pythons().get(minor)
    if python is None:
        pytest.skip(f"NOT TESTED with Python 3.{minor}: no such interpreter on PATH or in pyenv")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "other").mkdir()
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE.parent), "PHALANX_RUN_DIR": str(tmp_path)}
    base |= {"PHALANX_LAUNCH_ID": "one", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    base |= {"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "2", "PYTHONDONTWRITEBYTECODE": "1"}
    alone = {name: text for name, text in base.items() if not name.startswith("SLURM")}
    worker = [python, "-m", "phalanx.worker"]
    script = str(tmp_path / "script.py")

    def start(environ: dict[str, str], *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*worker, *words], env=environ, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    ranks = [start({**base, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}, script, "a b") for rank in ("0", "1")]
    failing = start({**alone, "PHALANX_RUN_DIR": str(tmp_path / "other")}, script, "fail")
    command = start(alone, "--exec", "sh", "-c", 'exit "$((RANK + 5))"')
    wrong = start({**alone, "RANK": "3", "WORLD_SIZE": "2"}, script)
    said = [process.communicate(timeout=60)[1] for process in (*ranks, failing, command, wrong)]
    assert [process.returncode for process in (*ranks, failing, command, wrong)] == [0, 0, 1, 5, 2], said
    seen = [(tmp_path / f"seen{rank}").read_text().split() for rank in (0, 1)]
    assert [words[:5] for words in seen] == [["a", "b", rank, "2", rank] for rank in ("0", "1")]
    assert (tmp_path / "port0").read_text() == (tmp_path / "port1").read_text()
    assert "ValueError: on purpose" in said[2]
    report = json.loads((tmp_path / "other" / "errors" / "0.json").read_text())
    assert report["exception"] == "ValueError: on purpose"
    assert "RANK=3 but WORLD_SIZE=2" in said[4]
