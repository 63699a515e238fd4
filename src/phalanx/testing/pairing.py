"""Which launcher runs tests of which marker, and in which strategy; wrong pairs are refused before anything starts."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import product

from ..errors import PlanError, UsageError
from ..planning import cells


@dataclass(frozen=True)
class Kind:
    """Tests of one marker. `strategies` are those whose ranks they can be, `strategy` the setting for them; `here` and
    `in_job` are the launchers on one machine and in a Slurm job."""

    marker: str
    strategies: tuple[str, ...]
    strategy: str
    here: str
    in_job: str

    def launcher(self, in_job: bool) -> str:
        return self.in_job if in_job else self.here


_TORCH = ("auto", "ddp", "fsdp", "single")
KINDS: Mapping[str, Kind] = {
    kind.marker: kind
    for kind in (
        Kind("torch_dist", _TORCH, "auto", "torchrun", "torchrun"),
        Kind("deepspeed_dist", ("deepspeed",), "deepspeed", "torchrun", "srun"),
        Kind("horovod_dist", ("horovod",), "horovod", "horovodrun", "mpirun"),
        Kind("ray_dist", ("auto", "ddp", "fsdp", "deepspeed"), "auto", "ray", "ray"),
    )
}


def expressions(text: str | None) -> dict[str, str]:
    """The kinds that an expression of markers (`hpc and torch_dist`) selects, each with the expression for its launch;
    all, if it names none.

    Raises UsageError for one that can't be read, or that no single launch could satisfy.
    """
    if text is None:
        return {marker: marker for marker in KINDS}
    tree, names = _parsed(text)
    if tree is None:  # pytest's own forms, such as mark(x=1)
        named = [marker for marker in KINDS if marker in text]
        if len(named) != 1:
            raise UsageError(f"-m {text!r}: give one of {', '.join(KINDS)} in it")
        return {named[0]: text}
    chosen = [marker for marker in KINDS if _possible(tree, names, marker)]
    if not chosen:
        raise UsageError(
            f"-m {text!r} selects no tests that one launcher runs: expected one of {', '.join(KINDS)} in it"
        )
    return {marker: _only(text, marker, names) for marker in chosen}


def _only(text: str, marker: str, names: Collection[str]) -> str:
    return text if set(names) & set(KINDS) == {marker} else f"({text}) and {marker}"


def _parsed(text: str) -> tuple[ast.expr | None, list[str]]:
    """pytest's grammar is Python's for `and`, `or`, `not`, brackets and names."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise UsageError(f"-m {text!r} is no expression of markers: expected as in 'hpc and torch_dist'") from None
    nodes = list(ast.walk(tree))
    plain = (ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.Name, ast.Load, ast.Constant)
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    return (tree if all(isinstance(node, plain) for node in nodes) else None), names


def _possible(tree: ast.expr, names: Collection[str], marker: str) -> bool:
    """Whether a test with this marker, and no other kind's, can be selected, whatever else it is marked with."""
    free = sorted(set(names) - set(KINDS))
    for values in product((True, False), repeat=min(len(free), 10)):
        known = {**dict.fromkeys(KINDS, False), marker: True, **dict(zip(free, values, strict=False))}
        if _value(tree, known):
            return True
    return False


def _value(tree: ast.expr, known: Mapping[str, bool]) -> bool:
    if isinstance(tree, ast.BoolOp):
        values = (_value(part, known) for part in tree.values)
        return all(values) if isinstance(tree.op, ast.And) else any(values)
    if isinstance(tree, ast.UnaryOp):
        return not _value(tree.operand, known)
    return known.get(tree.id, True) if isinstance(tree, ast.Name) else bool(getattr(tree, "value", True))


def check(kind: Kind, launcher: str, strategy: str, place: cells.Cell, processes: int, in_job: bool) -> None:
    """Refuse a launcher or strategy that can't run tests of this kind; `place` says runtime and nodes.

    Raises PlanError with the reason and the nearest that works.
    """
    if strategy not in kind.strategies:
        expected = " or ".join(kind.strategies)
        raise PlanError(f"-m {kind.marker} with strategy {strategy}: these tests run under {expected}; unset strategy")
    if kind.marker == "ray_dist" and launcher != "ray":
        raise PlanError(f"-m ray_dist with launcher {launcher}: these tests need Ray's cluster; use --launcher ray")
    ranks = strategy if strategy != "auto" else "ddp" if processes > 1 else "single"
    at = place._replace(launcher=launcher, strategy=ranks)
    reason = cells.refusal(at, processes)
    if reason is not None:
        wanted = at._replace(launcher=kind.launcher(in_job))
        near = wanted if cells.refusal(wanted, processes) is None else cells.nearest(at, processes)
        raise PlanError(
            f"-m {kind.marker} with launcher {launcher}: {reason}. The nearest that works: --launcher {near.launcher}"
        )
