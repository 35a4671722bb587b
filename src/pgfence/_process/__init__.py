"""Manage this process: its clock, threads, forks and exit. No SQL, no locks."""
