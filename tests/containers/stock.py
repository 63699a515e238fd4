"""An image as people pull it: an interpreter of its own with torch and numpy, and nothing of ours.

Its packages are links into the tests' own environment, which is bound, so that nothing of torch's size is copied.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tests.containers import image

PLACE = "/opt/stock"  # where the image has its Python, first on its PATH


def make(folder: Path) -> Path:
    """The image; its interpreter comes by a bind."""
    root = image.root(folder)
    definition = folder / "stock.def"
    definition.write_text(
        f"Bootstrap: localimage\nFrom: {root}\n%environment\n    export PATH={PLACE}/bin:$PATH\n"
        f"    export PYTHONPATH={PLACE}/own\n"
    )
    sif = folder / "stock.sif"
    environ = {**os.environ, "PATH": image.path(), "APPTAINER_CACHEDIR": str(folder / "cache")}
    subprocess.run(["apptainer", "build", str(sif), str(definition)], env=environ, check=True, capture_output=True)
    return sif


def interpreter(folder: Path, packages: Sequence[str] = ("torch", "numpy"), python: str = sys.executable) -> Path:
    """A virtual environment that holds `packages` of the tests' own, and what those need; `own/` in it has a module
    that the image's PYTHONPATH leads to."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    for name in sorted(closure(packages)):
        for path in {file.parts[0] for file in distribution(name).files or () if file.parts[0] not in ("..", "bin")}:
            target = Path(str(distribution(name).locate_file(path)))
            if target.exists() and not (site / path).exists() and path != "__pycache__":
                (site / path).symlink_to(target)
    (folder / "own").mkdir()
    (folder / "own" / "images_module.py").write_text("HERE = True\n")
    return folder


def closure(packages: Sequence[str]) -> set[str]:
    """The packages and what they need, as far as it is installed."""
    found: set[str] = set()
    waiting = list(packages)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            waiting += [re.split(r"[^\w.-]", word)[0] for word in needs if "extra ==" not in word]
    return found


def wheelhouse(folder: Path, packages: Sequence[str] = ("pydantic", "PyYAML", "rich")) -> Path:
    """Wheels of what is installed here, so that pip needs no network."""
    folder.mkdir()
    for name in closure(packages):
        found = distribution(name)
        files = [file for file in found.files or () if file.parts[0] not in ("..", "bin") and file.suffix != ".pyc"]
        info = next(file.parts[0] for file in files if file.parts[0].endswith(".dist-info"))
        tag = re.search(r"(?m)^Tag: (\S+)", found.read_text("WHEEL") or "")
        assert tag
        with zipfile.ZipFile(folder / f"{info.removesuffix('.dist-info')}-{tag[1]}.whl", "w") as wheel:
            for file in files:
                if file.name not in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
                    wheel.write(str(found.locate_file(file)), str(file))
            wheel.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in wheel.namelist()) + f"{info}/RECORD,,\n")
    return folder


def settings(sif: Path, python: Path, *binds: str) -> str:
    """A job file of a user of that image: what a pulled one has in it is bound here."""
    folders = {sys.prefix} | ({sys.base_prefix} if not sys.base_prefix.startswith("/usr") else set())
    all_binds = ["/usr:/usr:ro", *(f"{folder}:{folder}:ro" for folder in sorted(folders)), f"{python}:{PLACE}:ro"]
    return f"device: cpu\ncontainer:\n  image: {sif}\n  binds: {json.dumps([*all_binds, *binds])}\n"
