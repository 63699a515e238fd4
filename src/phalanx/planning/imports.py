"""What a script and the modules beside it import, by their source."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """A file and the dotted names that it imports; `tree` is None for one that can't be read."""

    file: Path
    tree: ast.Module | None
    names: tuple[str, ...] = ()


def walk(script: Path, folders: Sequence[Path], imports: Callable[[ast.Module], Iterable[str]]) -> Iterator[Source]:
    """The script and those modules below `folders` that it imports, itself or by others, each once.
    `imports` says which names of a module count."""
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
            yield Source(file, None)
            continue
        names = tuple(imports(tree))
        waiting += [path for name in names for path in files_of(name, folders, file)]
        yield Source(file, tree, names)


def imported(nodes: Iterable[ast.AST], members: bool = False) -> Iterator[str]:
    """Dotted names that are imported by `nodes`; relative ones begin with their dots. With
    `members`, `from a import b` means a module `a.b` too, which it may."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base
            joint = "" if base.endswith(".") else "."
            yield from (f"{base}{joint}{alias.name}" for alias in node.names if members)


def search_path(script: Path) -> list[Path]:
    """Where the script's own modules may lie."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [script.resolve().parent, Path.cwd(), *(Path(folder) for folder in given if folder)]


def files_of(name: str, folders: Sequence[Path], file: Path) -> Iterator[Path]:
    """The files that importing `name` in `file` would run, of those below `folders`."""
    dots = len(name) - len(name.lstrip("."))
    roots = [file.parents[dots - 1]] if dots and dots <= len(file.parents) else [] if dots else folders
    parts = [part for part in name.split(".") if part]
    for root in roots:
        for length in range(1, len(parts) + 1):
            path = root.joinpath(*parts[:length])
            yield from (one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file())
