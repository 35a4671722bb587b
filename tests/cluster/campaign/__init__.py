"""Many failovers of all kinds while clients work, judged: `python -m tests.cluster.campaign --help`."""

from __future__ import annotations
