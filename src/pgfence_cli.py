"""The console script `pgfence`. It is outside the package, because importing the package imports SQLAlchemy."""

from __future__ import annotations

import gc


def main() -> int:
    """Run the command that the arguments of this process select, and return its exit code."""
    # The garbage collector would take an eighth of the time until a command starts and free nothing, because what an import creates
    # stays. `pgfence.cli.main` switches it on again.
    gc.disable()
    from pgfence.cli import main

    return main()
