"""Site profiles: the shipped ones by name, and a new one from what a cluster says of itself."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent


def shipped() -> dict[str, Path]:
    """The profiles that come with the package, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
