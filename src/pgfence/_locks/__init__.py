"""Acquire and release of session locks."""
