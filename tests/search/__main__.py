"""A longer search than the tests': `make search MINUTES=10`."""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.search.hunt import Summary, hunt
from tests.search.ranks import Pool


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.search", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first cases; unset: another each time")
    parser.add_argument("--without", nargs="*", default=[], help="dimensions to leave out, as the summary names them")
    parser.add_argument("--mutant", default="", help="a fix to take back, of mutants.py")
    parser.add_argument("--known", default="", help="a regular expression: wrong results that match it don't count")
    options = parser.parse_args()
    number = random.randrange(2**32) if options.seed is None else options.seed
    until, summary, found = time.monotonic() + 60 * options.minutes, Summary(), {}
    with Pool(options.mutant) as pool:
        while time.monotonic() < until:
            finding = hunt(pool, summary, 25, number, until, options.without, options.known)
            if finding is not None and repr(finding.case) not in found:
                found[repr(finding.case)] = finding
                print(
                    f"\nWRONG (seed {number}): {finding}\n-> paste the case into tests/search/examples.py", flush=True
                )
            number += 1
    print("\n".join(summary.lines()))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
