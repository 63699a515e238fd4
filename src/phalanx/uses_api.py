"""Whether a script may use the API, as far as its source and the modules beside it tell.

A dry run shortens the loops of `phalanx.init()`'s run; a script without one would train in full. It is refused only
where every import is accounted for: what may import more at run time, or is unknown, gets the benefit of the doubt.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .errors import PlanError

_DYNAMIC = {"importlib", "runpy", "subprocess", "imp", "pkgutil"}
_DYNAMIC_NAMES = {"exec", "eval", "__import__"}
# Packages of others that import no scripts' modules by name, and don't train by this one.
_PLAIN = {
    *("torch", "torchvision", "torchaudio", "numpy", "scipy", "pandas", "sklearn", "PIL", "cv2", "matplotlib", "tqdm"),
    *("yaml", "rich", "einops", "timm", "transformers", "datasets", "tokenizers", "safetensors", "deepspeed"),
    *("horovod", "accelerate", "lightning", "wandb", "mlflow", "tensorboard", "h5py", "zarr", "xarray", "mpi4py"),
}


def check_dry_run(script: Path) -> None:
    """Raise PlanError for a script that certainly makes no run."""
    if not may_use_api(script, search_path(script)):
        raise PlanError(
            f"dry_run shortens the loops of the run that phalanx.init() makes, and neither {script} nor a module that "
            "it imports uses phalanx: it would train in full. Leave --dry-run out, and give the script few steps itself"
        )


def search_path(script: Path) -> list[Path]:
    """Where the script's own modules may lie."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [script.resolve().parent, Path.cwd(), *(Path(folder) for folder in given if folder)]


def may_use_api(script: Path, folders: Sequence[Path]) -> bool:
    """False if nothing that the script imports is, or may import, this package."""
    seen: set[Path] = set()
    waiting = [script]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):  # running it will say so
            return True
        for name in _imports(tree, file):
            top = name.partition(".")[0]
            if top == "phalanx" or top in _DYNAMIC:
                return True
            found = list(files_of(name, folders, file))
            if not found and not name.startswith(".") and top not in _PLAIN and top not in sys.stdlib_module_names:
                return True  # another's package: who knows
            waiting += found
        if any(isinstance(node, ast.Name) and node.id in _DYNAMIC_NAMES for node in ast.walk(tree)):
            return True
    return False


def _imports(tree: ast.AST, file: Path) -> Iterator[str]:
    """Dotted names; relative ones begin with their dots. `from a import b` may mean a module `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base
            joint = "" if base.endswith(".") else "."
            yield from (f"{base}{joint}{alias.name}" for alias in node.names)


def files_of(name: str, folders: Sequence[Path], file: Path) -> Iterator[Path]:
    """The files that importing `name` would run, of those below `folders`."""
    dots = len(name) - len(name.lstrip("."))
    roots = [file.parents[dots - 1]] if dots and dots <= len(file.parents) else [] if dots else folders
    parts = [part for part in name.split(".") if part]
    for root in roots:
        for length in range(1, len(parts) + 1):
            path = root.joinpath(*parts[:length])
            yield from (one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file())
