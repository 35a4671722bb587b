"""Idempotency keys, under each of which work is done once, in the caller's own transaction."""

from __future__ import annotations

from pgfence.idempotency._decorator import idempotent_call
from pgfence.idempotency._functions import idempotent, insert_once
from pgfence.idempotency._handles import AsyncIdem, Idem, Op

__all__ = ["AsyncIdem", "Idem", "Op", "idempotent", "idempotent_call", "insert_once"]
