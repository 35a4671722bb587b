"""Run one client: `python -m tests.cluster.clients --url URL --way WAY --record FILE`, until its standard input is closed."""

from __future__ import annotations

import sys
from pathlib import Path

# `python -m tests.cluster.clients` finds the package under another name than pytest.
sys.path.insert(0, str(Path(__file__).parents[2]))

if __name__ == "__main__":
    from cluster.clients.client import main

    main()
