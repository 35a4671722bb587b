"""Run a campaign, or merge the results of several: `python -m tests.cluster.campaign --help`."""

from __future__ import annotations

import sys
from pathlib import Path

# `python -m tests.cluster.campaign` finds the package under another name than pytest.
sys.path.insert(0, str(Path(__file__).parents[2]))

if __name__ == "__main__":
    from cluster.campaign.command import main

    sys.exit(main())
