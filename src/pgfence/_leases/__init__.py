"""Acquire, renew and release leases, slots and attempts."""
