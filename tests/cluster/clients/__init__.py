"""Clients of the cluster that use most primitives, and write down what they believed and what was acknowledged."""

from __future__ import annotations
