"""The acts, in the order in which they are played. A new act is a module with an ACT, listed here."""

from __future__ import annotations

from pgfence._demo.workloads import advisory, failures, transaction, unguarded

ACTS = (unguarded.ACT, transaction.ACT, advisory.ACT, failures.ACT)
