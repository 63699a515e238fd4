"""Whether the search finds known faults: each fix is taken back, and it must find that."""

from __future__ import annotations

import argparse
import sys
import time

from tests.search import mutants
from tests.search.cases import SOME
from tests.search.compare import compare
from tests.search.hunt import Finding, Summary, hunt
from tests.search.ranks import Pool

CASES = 25  # drawn from a seed, before the next one


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.search.proof", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="for each fault")
    parser.add_argument("--without", nargs="*", default=[], help="as for the search, and so is:")
    parser.add_argument("--known", default="")
    parser.add_argument("mutants", nargs="*", default=list(mutants.MUTANTS), help="all, unless named")
    options = parser.parse_args()
    missed = []
    for name in options.mutants:
        mutants.apply(name)  # a mutant without its target ends the proof
        begin = time.monotonic()
        finding = _search(name, begin + 60 * options.minutes, options)
        seconds = time.monotonic() - begin
        print(f"{name}: {f'found, {finding}' if finding else f'NOT FOUND in {seconds:.0f} s'}\n", flush=True)
        missed += [] if finding else [name]
    print(f"{len(options.mutants) - len(missed)} of {len(options.mutants)} found")
    return bool(missed)


def _search(mutant: str, until: float, options: argparse.Namespace) -> Finding | None:
    """The first case that is wrong because of the mutant: it is right without."""
    summary, number = Summary(), 0
    with Pool(mutant) as pool:
        while time.monotonic() < until:
            finding = hunt(pool, summary, CASES, number, until, options.without, options.known, SOME)
            if finding is not None and _right_without(finding):
                return finding
            number += 1
    return None


def _right_without(finding: Finding) -> bool:
    """Whether the case is right in the product as it is."""
    with Pool() as pool:
        wrong = compare(pool, finding.case, [finding.place]).wrong
    for words in wrong.values():
        print(f"wrong without the mutant too, {finding.case} at {finding.place}: {words}", flush=True)
    return not wrong


if __name__ == "__main__":
    sys.exit(main())
