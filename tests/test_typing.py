"""The programs of `tests/typing` under mypy and pyright: what users write is inferred, what they mistake is reported."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TYPING = Path(__file__).parent / "typing"
CHECKS = {
    "mypy": ["--config-file", str(TYPING / "mypy.ini")],
    "pyright": ["--project", str(TYPING), "--pythonpath", sys.executable],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", CHECKS)
def test_the_programs_of_users_are_clean(checker: str, tmp_path: Path) -> None:
    """Every inferred type is the promised one, and every marked mistake is reported."""
    if find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed: dependency group typing")
    command = [sys.executable, "-m", checker, *CHECKS[checker]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
