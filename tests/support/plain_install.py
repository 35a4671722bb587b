"""Run by `nox -s plain` in an environment into which nothing but pgfence was installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

ALLOWED = {"cronsim", "greenlet", "pgfence", "sqlalchemy", "typing-extensions"}
INSTALLERS = {"pip", "setuptools", "wheel"}


def main() -> None:
    found = {each.name.lower().replace("_", "-") for each in distributions()} - INSTALLERS
    assert "pgfence" in found
    assert found <= ALLOWED, f"pip install pgfence also installs {sorted(found - ALLOWED)}"
    program = "import pgfence, pgfence.testing; from pgfence import *; print(pgfence.LockKey.of('a').value)"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, stdout=subprocess.DEVNULL)
    command = Path(sys.executable).with_name("pgfence")
    done = subprocess.run([command, "run", "x", "--", "true"], capture_output=True, text=True, check=False)
    said = "pgfence: the packages of the command line are not installed: run pip install 'pgfence[cli]'\n"
    assert (done.returncode, done.stdout, done.stderr) == (78, "", said), done
    print("installed:", *sorted(found))


if __name__ == "__main__":
    main()
