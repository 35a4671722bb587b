"""Encode, decode and compare the values stored under an idempotency key."""
