"""Acquire and release session locks."""
