"""Where a container finds this package, and what its API needs beyond torch.

`containers/wrap.py` binds the package alone to LIBRARY, which PYTHONPATH names, and the folder
that `phalanx container prepare` makes to PACKAGES. That comes last in sys.path, so that it hides
nothing which the image has. Runs on Python 3.8 too, as all that `rank/entry.py` imports.
"""

import os
import sys

LIBRARY = "/.phalanx/lib"
PACKAGES = "/.phalanx/packages"
IMPORTED = ("pydantic", "yaml", "rich")
REQUIREMENTS = ("pydantic>=2.7", "PyYAML>=6.0", "rich>=13.0")  # as in pyproject.toml


def add_packages() -> None:
    """Let this process import what was put beside the image."""
    if __file__.startswith(LIBRARY) and os.path.isdir(PACKAGES) and PACKAGES not in sys.path:  # noqa: PTH112
        sys.path.append(PACKAGES)


def lacking(error: ModuleNotFoundError) -> str:
    """How to get what the API needs, if a container lacks it; else nothing."""
    name = (error.name or "").partition(".")[0]
    if not __file__.startswith(LIBRARY) or name not in IMPORTED:
        return ""
    image = os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER") or "IMAGE"
    return f"the API needs {name}, which this image lacks: `phalanx container prepare {image}` puts it beside it, once"
