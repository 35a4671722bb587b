"""`python -m pgfence` is the command `pgfence`."""

from __future__ import annotations

import sys

from pgfence.cli import main

if __name__ == "__main__":
    sys.exit(main())
