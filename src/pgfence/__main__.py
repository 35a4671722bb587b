"""Run the command `pgfence` as `python -m pgfence`."""

from __future__ import annotations

import sys

from pgfence.cli import main

if __name__ == "__main__":
    sys.exit(main())
