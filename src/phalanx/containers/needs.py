"""What a rank will certainly import, by the script's source: an image must have it.

Only what stands outside of `try` and `if` counts (but for `if __name__ == "__main__"`), and of
imports those at the top level of the script and of its own modules. Others may never happen, and a
job that works is not refused.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..planning.imports import files_of, imported, search_path, walk
from ..planning.plan import LaunchPlan

_PLAIN = {"EpochTimer", "PhalanxError", "Topology", "__version__"}  # of the API, what needs no package
_PLAIN_MODULES = {"epoch_timer", "errors", "hostlist", "records", "rundir", "topology", "worker"}
_WITH_TORCH = {"init", "current", "Run", "shard", "run", "data", "strategies"}
_STARTERS = {"torchrun": "torch", "deepspeed": "deepspeed", "horovod": "horovod", "horovodrun": "horovod", "ray": "ray"}


@dataclass
class Needs:
    """Top-level packages, and names of this package's API that are used."""

    packages: set[str] = field(default_factory=set)
    api: set[str] = field(default_factory=set)

    @property
    def settings(self) -> bool:
        """Whether what the API needs beyond torch is needed."""
        return bool(self.api - _PLAIN - _PLAIN_MODULES)


def of(plan: LaunchPlan) -> Needs:
    """What the plan's launcher, strategy and script need; of a command nothing is known."""
    found = of_script(Path(plan.cwd, plan.script)) if plan.script is not None else Needs()
    found.packages |= {_STARTERS[word] for word in (plan.launcher, plan.strategy) if word in _STARTERS}
    found.packages |= {"torch"} if found.api & _WITH_TORCH else set()
    return found


def of_script(script: Path) -> Needs:
    needs, folders = Needs(), search_path(script)
    for source in walk(script, folders, lambda tree: imported(_certain(tree, functions=False))):
        tops = {name.partition(".")[0] for name in source.names} - {""}
        needs.packages |= {top for top in tops if not any(files_of(top, folders, source.file))}
        needs.api |= _api(source.tree, source.names) if source.tree is not None else set()
    return needs


def _api(tree: ast.Module, names: Sequence[str]) -> set[str]:
    """The names of this package that a module uses, if it certainly imports it."""
    found = {name.split(".")[1] for name in names if name.startswith("phalanx.")}
    aliases = set()
    for node in _certain(tree, functions=False):
        if isinstance(node, ast.ImportFrom) and node.module == "phalanx" and not node.level:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            aliases |= {alias.asname or "phalanx" for alias in node.names if alias.name == "phalanx"}
    used = (node for node in _certain(tree, functions=True) if isinstance(node, ast.Attribute))
    return found | {node.attr for node in used if isinstance(node.value, ast.Name) and node.value.id in aliases}


def _certain(tree: ast.AST, functions: bool) -> Iterator[ast.AST]:
    """The nodes that are reached on every way, those of functions' bodies too if so wanted."""
    for node in ast.iter_child_nodes(tree):
        is_main = isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
        maybe = isinstance(node, ast.If | ast.IfExp | ast.Try | ast.BoolOp) and not is_main
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef)
        if not maybe and (functions or not inside):
            yield node
            yield from _certain(node, functions)
