"""Benchmarks: `python -m benchmarks --help`. What is measured, and how, is in README.md beside this file."""
