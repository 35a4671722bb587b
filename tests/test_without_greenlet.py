"""The sync half needs no greenlet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "support" / "sync_half.py"


def test_sync_locks_work_without_greenlet(dsn: str) -> None:
    """A plain installation, which brings no greenlet along, can use every sync lock."""
    url = dsn.replace("postgresql://", "postgresql+psycopg://", 1)
    hide = f"import runpy, sys; sys.modules['greenlet'] = None; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    command = [sys.executable, "-W", "error", "-c", hide, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
