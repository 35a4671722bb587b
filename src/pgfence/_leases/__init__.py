"""Leases, slots and attempts, and what renews them."""
