"""Settings before they have types: nested mappings whose leaves know where they come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from .. import secret


@dataclass(frozen=True)
class Leaf:
    """One value, or a whole list or an empty mapping, with its origin (`base.yaml:3`, `command line`)."""

    value: Any
    origin: str


Tree: TypeAlias = "dict[str, Tree | Leaf]"
Path: TypeAlias = "tuple[str, ...]"


class Branch(dict[str, Any]):
    """A mapping that knows where it was written."""

    origin = ""


def grow(value: Any, origin: str) -> Tree | Leaf:
    """A tree from Python values; all leaves have the same origin."""
    if isinstance(value, Mapping) and value:
        return {key: grow(item, origin) for key, item in value.items()}
    return Leaf(dict(value) if isinstance(value, Mapping) else value, origin)


def merge(low: Tree | Leaf, high: Tree | Leaf) -> Tree | Leaf:
    """`high` over `low`: mappings merge key by key, anything else is replaced."""
    if isinstance(low, dict) and isinstance(high, dict):
        both = {key: merge(low[key], item) if key in low else item for key, item in high.items()}
        return {**low, **both}
    if isinstance(low, dict) and isinstance(high, Leaf) and high.value == {}:
        return low
    return high


def leaves(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
    """Every leaf with its path, in order."""
    for key, item in tree.items():
        if isinstance(item, Leaf):
            yield (*path, key), item
        else:
            yield from leaves(item, (*path, key))


def find(tree: Tree, path: Path) -> Tree | Leaf | None:
    """What stands at `path`, or None."""
    item: Tree | Leaf = tree
    for key in path:
        if isinstance(item, Leaf) or key not in item:
            return None
        item = item[key]
    return item


def values(item: Tree | Leaf) -> Any:
    """The values without their origins."""
    return item.value if isinstance(item, Leaf) else {key: values(child) for key, child in item.items()}


def origin_of(item: Tree | Leaf) -> str:
    """Where `item` was written: for a mapping made of several, its first leaf's origin."""
    own = getattr(item, "origin", "")
    if own or isinstance(item, Leaf):
        return str(own)
    return next((leaf.origin for _, leaf in leaves(item)), "")


def show(value: Any) -> str:
    """`value` as messages name it; one with a secret in it they don't repeat."""
    if secret.within(str(value)) is not None:
        return repr(secret.HIDDEN)
    return repr(str(value)) if isinstance(value, str) else repr(value)
