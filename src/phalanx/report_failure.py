"""`python -m phalanx.report_failure RUN_DIR STATUS`. Written job scripts call it by this name."""

import sys

from .schedulers.report_failure import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
