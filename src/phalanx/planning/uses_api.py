"""Whether a script may use the API, as far as its source and the modules beside it tell.

A dry run shortens the loops of `phalanx.init()`'s run; a script without one would train in full. It is refused only
where every import is accounted for: what may import more at run time, or is unknown, gets the benefit of the doubt.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import PlanError
from .imports import files_of, imported, search_path, walk

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


def may_use_api(script: Path, folders: Sequence[Path]) -> bool:
    """False if nothing that the script imports is, or may import, this package."""
    for source in walk(script, folders, lambda tree: imported(ast.walk(tree), members=True)):
        if source.tree is None or any(_may_be_it(name, folders, source.file) for name in source.names):
            return True
        if any(isinstance(node, ast.Name) and node.id in _DYNAMIC_NAMES for node in ast.walk(source.tree)):
            return True
    return False


def _may_be_it(name: str, folders: Sequence[Path], file: Path) -> bool:
    """Whether a name that `file` imports is this package, or another's of which that isn't known."""
    top = name.partition(".")[0]
    if top == "phalanx" or top in _DYNAMIC:
        return True
    known = not top or top in _PLAIN or top in sys.stdlib_module_names
    return not known and not any(files_of(name, folders, file))
