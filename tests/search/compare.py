"""A case at several places against the loop by hand: equal, refused or wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.search import reference, values
from tests.search.cases import Case
from tests.search.faults import passed_over
from tests.search.ranks import Answer, Place, Pool
from tests.search.refusals import known
from tests.search.script import Trace, play


@dataclass
class Verdict:
    """Of one case: where it was equal to the loop by hand, refused, or wrong."""

    equal: list[Place] = field(default_factory=list)
    resumed: list[Place] = field(default_factory=list)
    refused: dict[Place, str] = field(default_factory=dict)
    wrong: dict[Place, str] = field(default_factory=dict)
    cpu: float = 0.0  # seconds of all ranks


def compare(pool: Pool, case: Case, places: Iterable[Place], all_of_them: bool = False) -> Verdict:
    """Compare a case at `places`, passing over open faults, unless `all_of_them` are wanted."""
    verdict = Verdict()
    places = [place for place in places if all_of_them or not passed_over(case, place)]
    for place, answers in pool.run(play, case, places).items():
        verdict.cpu += sum(answer.cpu for answer in answers)
        refusals = [answer.refusal for answer in answers]
        if all(refusals):
            expected = any(known(place, words) for words in refusals)
            (verdict.refused if expected else verdict.wrong)[place] = refusals[0]
            continue
        problem = _failure(answers) or _difference(case, place, [answer.value for answer in answers])
        if problem:
            verdict.wrong[place] = problem
        else:
            verdict.equal.append(place)
            verdict.resumed += [place] * answers[0].value.resumed
    return verdict


def _failure(answers: list[Answer]) -> str:
    """What ranks that came to no result say; an error on some ranks only is one."""
    said = [f"rank {rank}: {a.failure or a.refusal}" for rank, a in enumerate(answers) if a.value is None]
    if not said:
        return ""
    fine = [str(rank) for rank, answer in enumerate(answers) if answer.value is not None]
    return "\n".join([*said, *([f"rank {', '.join(fine)}: no error"] if fine else [])])


def _difference(case: Case, place: Place, traces: list[Trace]) -> str:
    """The first thing that differs from the loop by hand; empty if nothing does."""
    keys = sorted({key for trace in traces for key in trace.fed})
    try:
        passes = {
            (name, epoch): reference.dealt(
                case, place.size, name, [trace.fed.get((name, epoch), []) for trace in traces]
            )
            for name, epoch in keys
        }
        right = reference.by_hand(case, place.size, passes)
    except reference.Misdealt as problem:
        return str(problem)
    except KeyError as error:
        return f"pass {error} was left out"
    for rank, trace in enumerate(traces):
        problem = _events(case, rank, trace, right)
        if problem:
            return problem
    if len({trace.replica for trace in traces}) > 1:
        return "the ranks' weights are not the same bits"
    return _weights(case, traces[0].weights, right.weights)


def _events(case: Case, rank: int, trace: Trace, right: reference.Expected) -> str:
    names = [name for name, _ in trace.events], [name for name, _ in right.events]
    if names[0] != names[1]:
        return f"rank {rank} saw {names[0]}: expected {names[1]}"
    for at, ((name, found), (_, by_rank)) in enumerate(zip(trace.events, right.events, strict=True)):
        wanted = by_rank[rank]
        if wanted is None:
            continue
        if name == "value":
            if not _value(case, found[0], wanted[0]):
                return f"rank {rank}: {case.value} gives {found[0]}: expected {wanted[0]}"
        elif not _close(case, found, wanted) and not (case.sharded != "fp32" and name != "rate"):
            return f"rank {rank}, event {at} ({name}): {found}, expected {wanted}"
    return ""


def _value(case: Case, found: Any, wanted: Any) -> bool:
    if isinstance(found, str) and found.startswith("refused") and values.may_refuse(case.value):
        return True
    return values.agree(found, wanted, "halves" in case.value)


def _weights(case: Case, found: dict[str, Any], wanted: dict[str, Any]) -> str:
    if found.keys() != wanted.keys():
        return f"the weights are named {sorted(found)}: expected {sorted(wanted)}"
    for name, value in wanted.items():
        if not _close(case, found[name], value):
            return f"weights {name}: {found[name]}, expected {value}"
    return ""


def _close(case: Case, found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(
            _close(case, a, b) for a, b in zip(found, wanted, strict=True)
        )  # fmt: skip
    if isinstance(wanted, int):
        return bool(found == wanted)
    if math.isnan(wanted):  # trained too fast, by hand too
        return math.isnan(found)
    if case.precision == "fp32":
        return math.isclose(found, wanted, rel_tol=2e-4, abs_tol=1e-5)
    return math.isclose(found, wanted, rel_tol=0.03, abs_tol=0.01)
