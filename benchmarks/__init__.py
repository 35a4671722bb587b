"""The benchmarks: run `python -m benchmarks --help`. README.md in this folder says what is measured and how."""
