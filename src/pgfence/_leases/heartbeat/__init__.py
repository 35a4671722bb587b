"""Renew leases in the background."""
