"""Random small trainings under every strategy against a loop by hand: see CONTRIBUTING."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.harness import run_ranks
from tests.search import mutants
from tests.search.cases import PLACES, REQUIRED, SOME, there
from tests.search.compare import compare
from tests.search.examples import EVERYWHERE, EXAMPLES
from tests.search.faults import OPEN, Open
from tests.search.hunt import ENOUGH, Summary, hunt
from tests.search.ranks import Pool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SEEDS = (1,)
CASES = 12  # drawn from each


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as living:
        yield living


@pytest.fixture(scope="module")
def summary() -> Summary:
    return Summary()


def test_what_was_wrong_once_is_right(pool: Pool, summary: Summary) -> None:
    wrong = []
    for case in (*EXAMPLES, *EVERYWHERE):
        verdict = compare(pool, case, there(SOME if case in EXAMPLES else PLACES))
        summary.add(case, verdict)
        wrong += [f"{case} at {place}: {words}" for place, words in verdict.wrong.items()]
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("fault", OPEN, ids=lambda fault: fault.what)
def test_an_open_fault_is_still_there(pool: Pool, fault: Open) -> None:
    """What has been mended is no longer passed over, and its case becomes an example."""
    if not there([fault.place]):
        pytest.skip(f"{fault.place.strategy} is not installed: `make engines` does it")
    assert compare(pool, fault.case, [fault.place], all_of_them=True).wrong, "mended: move it to examples.py"


def test_each_mutant_has_its_target(tmp_path: Path) -> None:
    """`make search-proof` takes fixes back one by one; code that moves takes its mutant along."""
    assert run_ranks(all_mutants, 1, folder=tmp_path) == [True]


def all_mutants() -> bool:
    for name in mutants.MUTANTS:
        mutants.apply(name)
    return True


@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_cases_equal_the_loop_by_hand(pool: Pool, summary: Summary, seed: int) -> None:
    finding = hunt(pool, summary, CASES, seed)
    assert finding is None, f"paste this case into tests/search/examples.py:\n{finding}"


def test_every_strategy_and_dimension_was_compared(summary: Summary) -> None:
    """What refuses everything, or is never drawn, would prove nothing."""
    print("\n".join(summary.lines()))
    few = [str(place) for place in PLACES if place in there() and summary.equal[place] < ENOUGH]
    few += [name for name in REQUIRED if summary.dimensions[name] < ENOUGH]
    assert not few, "\n".join([f"compared fewer than {ENOUGH} times: {', '.join(few)}", *summary.lines()])
