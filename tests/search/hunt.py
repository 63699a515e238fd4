"""The search itself: hypothesis draws cases until one is wrong, and makes that one simple."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky

from tests.search.cases import PLACES, Case, cases, there
from tests.search.compare import Verdict, compare
from tests.search.ranks import Place, Pool

SHRINK = 45.0  # seconds for making a wrong case simple
ENOUGH = 5  # compared cases that each strategy and world size, and each dimension, must have


@dataclass
class Summary:
    """What was compared: counts by place, and by dimension (a case at a place counts once)."""

    equal: Counter[Place] = field(default_factory=Counter)
    refused: Counter[Place] = field(default_factory=Counter)
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    dimensions: Counter[str] = field(default_factory=Counter)
    seen: set[Case] = field(default_factory=set)
    cpu: float = 0.0
    begin: float = field(default_factory=time.monotonic)

    def add(self, case: Case, verdict: Verdict) -> None:
        self.cpu += verdict.cpu
        self.equal.update(verdict.equal)
        self.refused.update(verdict.refused.keys())
        for place, said in verdict.refused.items():
            self.reasons[place.strategy, said[:110]] += 1
        for name in case.dimensions:
            resumed = verdict.resumed if name.startswith("resume") else verdict.equal
            self.dimensions[name] += len(resumed)

    @property
    def rate(self) -> float:
        """Compared cases a minute."""
        return 60 * self.equal.total() / max(1e-9, time.monotonic() - self.begin)

    def lines(self) -> list[str]:
        """The table of strategy and world size, the dimensions, and what was refused."""
        table = [f"{'strategy x ranks':18}{'equal':>7}{'refused':>9}"]
        table += [f"{place!s:18}{self.equal[place]:7}{self.refused[place]:9}" for place in PLACES]
        counted = ", ".join(f"{name} {count}" for name, count in sorted(self.dimensions.items()))
        said = [f"  {count:3} x {name}: {text}" for (name, text), count in self.reasons.most_common()]
        count, load = self.equal.total(), os.getloadavg()[0]
        total = f"{count} compared cases, {self.rate:.0f} a minute at a load of {load:.0f} on {os.cpu_count()} cores; "
        total += f"{1000 * self.cpu / max(1, count):.0f} ms of CPU each"
        return [*table, total, f"compared by dimension: {counted}", *(["refused:"] if said else []), *said]


@dataclass(frozen=True)
class Finding:
    """The simplest wrong case that was found, and how."""

    case: Case
    place: Place
    words: str
    first: float  # seconds until a case was wrong
    seconds: float  # and until it was made simple

    def __str__(self) -> str:
        when = f"({self.first:.0f} s, simplest after {self.seconds:.0f} s)"
        return f"{self.case}\nat {self.place}: {self.words.strip()}\n{when}"


def hunt(
    pool: Pool,
    summary: Summary,
    count: int,
    number: int,
    until: float = float("inf"),
    without: Sequence[str] = (),
    known: str = "",
    places: Sequence[Place] = PLACES,
) -> Finding | None:
    """Draw `count` cases from seed `number`; the first wrong one in its simplest form, or None.

    Wrong cases are made simple at the smallest place where they are wrong. Faults whose words match
    `known` don't count.
    """
    begin = time.monotonic()
    found: list[tuple[Case, Place, str, float]] = []

    def look(case: Case) -> None:
        now = time.monotonic() - begin
        if now > found[0][3] + SHRINK if found else time.monotonic() > until:
            return
        if case in summary.seen and not found:
            return
        verdict = compare(pool, case, [found[0][1]] if found else there(places))
        if not found:
            summary.seen.add(case)
            summary.add(case, verdict)
        for place, words in sorted(verdict.wrong.items(), key=lambda item: item[0].size):
            if known and re.search(known, words):
                continue
            found.append((case, place, words, time.monotonic() - begin))
            raise AssertionError(words)

    drawn = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )(seed(number)(given(cases(tuple(without)))(look)))
    try:
        drawn()
    except (AssertionError, Flaky):
        pass
    if not found:
        return None
    simplest = min(found, key=lambda item: (len(item[0].dimensions), len(repr(item[0]))))
    return Finding(*simplest[:3], first=found[0][3], seconds=time.monotonic() - begin)
