"""`python -m phalanx.ports JOB`. Written job scripts call it by this name."""

import sys

from .rank.ports import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
