"""YAML: read into trees that keep quoting and the line of each value, and written to read back exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, cast

import yaml

from ..errors import ConfigError
from ..shell import MARK
from .text import Plain, ShellText, free, is_null
from .tree import Branch, Leaf, Tree

_PREFIX = "tag:yaml.org,2002:"
_PLAIN = _PREFIX + "plain"
_TEXT = _PREFIX + "str"
# A standard tag other than !!str says: this is a number (bool, null), as if it stood there without quotes.
_PLAIN_TAGS = {_PLAIN, *(_PREFIX + name for name in ("int", "float", "bool", "null"))}


class _Loader(yaml.BaseLoader):
    """Marks unquoted scalars and guesses no types."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            return _PLAIN if implicit[0] else _TEXT
        return cast("str", super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]


class _Dumper(yaml.SafeDumper):
    """Quotes every text that a reader, ours or one of YAML 1.1, would take for something else."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        tag = cast("str", super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]
        plain_text = kind is yaml.ScalarNode and implicit[0] and tag.endswith(":str")
        return "not text" if plain_text and not isinstance(free(Plain(value)), str) else tag

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, value: str) -> yaml.ScalarNode:
        # In single quotes PyYAML writes line breaks such as NEL raw, and they come back as a space.
        style = None if value.isprintable() else '"'
        return self.represent_scalar(_TEXT, value, style)


class Reference(str):
    """Text with `${…}` that is to be resolved when the file is read: it is quoted, and not escaped."""

    __slots__ = ()


def _reference(dumper: _Dumper, value: Reference) -> yaml.ScalarNode:
    return dumper.represent_scalar(_TEXT, str(value), '"')


_Dumper.add_representer(str, _Dumper.text)
_Dumper.add_representer(Reference, _reference)


def write(settings: Mapping[str, Any]) -> str:
    """`settings` (texts, numbers, bools, None, lists, mappings) as YAML that reads back exactly."""
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**9)


class _Problem(Exception):
    def __init__(self, message: str, mark: yaml.Mark) -> None:
        super().__init__(message)
        self.line = mark.line + 1


def read_file(path: str | Path, label: str = "") -> Tree:
    """The mapping in a YAML file; each leaf's origin is `label` + `path:line`.

    Raises ConfigError, with path and line, on a missing file, broken YAML, a key given twice or anything
    that is no mapping.
    """
    try:
        return _read(Path(path).read_bytes(), f"{label}{path}")
    except FileNotFoundError:
        raise ConfigError(f"settings file {str(path)!r} does not exist") from None
    except OSError as error:
        raise ConfigError(f"settings file {str(path)!r} cannot be read: {error.strerror}") from None


def parse_flow(text: str) -> Any:
    """The list or dict that `text` is as a YAML flow collection (`[a, b]`, `{a: 1}`), or None."""
    try:
        node = yaml.compose(text, Loader=_Loader)
        value = None if node is None else _Builder("").value(node)
    except (yaml.YAMLError, _Problem, RecursionError):
        return None
    return value if isinstance(value, (list, dict)) else None


def _read(content: bytes, name: str) -> Tree:
    try:
        node = yaml.compose(content, Loader=_Loader)
        return {} if node is None else _Builder(name).document(node)
    except _Problem as error:
        raise ConfigError(f"{name}:{error.line}: {error}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply") from None


_Items: TypeAlias = "dict[str, tuple[yaml.Node, int]]"


class _Builder:
    """Turns composed YAML nodes into trees, or lists and dicts below a list."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open: set[int] = set()  # nodes being built, to notice an anchor that holds itself

    def document(self, node: yaml.Node) -> Tree:
        if isinstance(node, yaml.ScalarNode) and is_null(self._scalar(node)):
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise _Problem("expected a mapping of settings (key: value)", node.start_mark)
        return self._tree(node)

    def _tree(self, node: yaml.MappingNode) -> Tree:
        with self.inside(node):
            return {key: self._branch(item, line) for key, (item, line) in self._items(node).items()}

    def _branch(self, node: yaml.Node, line: int) -> Tree | Leaf:
        origin = f"{self._name}:{line}"
        if isinstance(node, yaml.MappingNode) and node.value:
            branch = Branch(self._tree(node))
            branch.origin = origin
            return branch
        return Leaf(self.value(node), origin)

    def value(self, node: yaml.Node) -> Any:
        """The value without origins: plain or quoted text, a list or a dict."""
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        assert isinstance(node, yaml.CollectionNode)
        with self.inside(node):
            if isinstance(node, yaml.MappingNode):
                return {key: self.value(item) for key, (item, _) in self._items(node).items()}
            return [self.value(item) for item in node.value]

    def _scalar(self, node: yaml.ScalarNode) -> str:
        if node.tag in _PLAIN_TAGS:
            return Plain(node.value)
        if node.tag == MARK.strip():
            return ShellText(MARK + node.value)
        if node.tag != _TEXT:
            raise _Problem(f"the tag {node.tag!r} has no meaning here", node.start_mark)
        return str(node.value)

    @contextmanager
    def inside(self, node: yaml.CollectionNode) -> Iterator[None]:
        kind = "map" if isinstance(node, yaml.MappingNode) else "seq"
        if node.tag != _PREFIX + kind:
            raise _Problem(f"the tag {node.tag!r} has no meaning here", node.start_mark)
        if id(node) in self._open:
            raise _Problem("an anchor holds itself", node.start_mark)
        self._open.add(id(node))
        yield
        self._open.discard(id(node))

    def _items(self, node: yaml.MappingNode) -> _Items:
        """Each key's value and line; what `<<` merges comes first, unless the mapping itself has the key."""
        own: _Items = {}
        merged: _Items = {}
        for key_node, item in node.value:
            key = self._key(key_node)
            if isinstance(key, Plain) and key == "<<":
                merged = self._merged(item)
                continue
            if key in own:
                raise _Problem(f"the key {str(key)!r} stands twice in one mapping", key_node.start_mark)
            own[str(key)] = (item, key_node.start_mark.line + 1)
        return {**merged, **own}

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise _Problem("a key must be text", node.start_mark)
        return self._scalar(node)

    def _merged(self, node: yaml.Node) -> _Items:
        if isinstance(node, yaml.MappingNode):
            return self._items(node)
        if not isinstance(node, yaml.SequenceNode):
            raise _Problem("'<<' takes a mapping or a list of mappings", node.start_mark)
        merged: _Items = {}
        for item in node.value:  # of several, the first has precedence
            merged = {**self._merged(item), **merged}
        return merged
