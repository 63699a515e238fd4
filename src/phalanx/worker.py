"""`python -m phalanx.worker SCRIPT`: a rank. Written job scripts call it by this name."""

import sys

from .rank.entry import main

if __name__ == "__main__":
    main(sys.argv[1:])
