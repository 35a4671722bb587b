"""The acts, in the order in which they are played. A new one is a file with an ACT, and its place in this list."""

from __future__ import annotations

from pgfence._demo.workloads import advisory, failures, transaction, unguarded

ACTS = (unguarded.ACT, transaction.ACT, advisory.ACT, failures.ACT)
