"""A cluster of three PostgreSQL servers with automatic failover on this machine, and the faults that it is tested with."""

from __future__ import annotations
