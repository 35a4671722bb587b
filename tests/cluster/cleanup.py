"""Stop everything that belongs to a cluster, and remove it. Needs the standard library only.

Run as a script, `cleanup.py FOLDER PARENT`, it waits for the end of the process that started the cluster, and then cleans up:
also after SIGKILL, when that process can no longer do it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MARKER = "PGFENCE_TEST_CLUSTER_FOLDER"
"""The variable in the environment of each process of a cluster."""
DESCRIPTION = "cluster.json"
"""The file in the folder of a cluster that says what it consists of."""
_PATIENCE = 5.0


def find_processes(folder: Path) -> dict[int, str]:
    """Return the processes of a cluster, and the names of their programs."""
    place = str(folder.resolve())
    found = {}
    for entry in Path("/proc").iterdir():
        # Processes end while they are looked at, and those of other users cannot be read.
        with suppress(OSError):
            if entry.name.isdigit() and _is_in(place, str((entry / "cwd").readlink())):
                program = (entry / "exe").readlink().name.removesuffix(" (deleted)")
                # A shell of a person in the folder has neither. PostgreSQL's processes overwrite their environment.
                if program == "postgres" or f"{MARKER}={place}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = program
    return found


def _is_in(place: str, path: str) -> bool:
    return path == place or path.startswith((f"{place}/", f"{place} (deleted)"))


def stop_processes(folder: Path) -> None:
    """End the processes of a cluster: PostgreSQL by an immediate shutdown, which removes its shared memory, and others by SIGKILL."""
    end = time.monotonic() + _PATIENCE
    while found := find_processes(folder):
        late = time.monotonic() > end
        for pid, program in found.items():
            gentle = program == "postgres" and not late
            send_signals([pid], signal.SIGQUIT if gentle else signal.SIGKILL, signal.SIGCONT)
        time.sleep(0.05)


def send_signals(pids: list[int], *numbers: signal.Signals) -> None:
    """Send signals to processes, some of which may have ended."""
    for pid in pids:
        for number in numbers:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def find_routes(hosts: list[str]) -> list[str]:
    """Return those of the hosts that are unreachable because of a route that a strike has added."""
    ip = shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin")
    if ip is None:
        return []
    words = [ip, "route", "show", "table", "local", "type", "unreachable"]
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    return [line.split()[1] for line in answer.stdout.splitlines() if line.split()[1] in hosts]


def change_route(action: str, host: str) -> None:
    """Add or delete (`del`) a route that makes a host unreachable. Needs root.

    Raises:
        CalledProcessError: the route cannot be changed.
    """
    ip = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "ip"
    subprocess.run([ip, "route", action, "unreachable", f"{host}/32", "table", "local"], check=True)


def remove(folder: Path) -> None:
    """Stop a cluster, and remove its routes, shared memory and files."""
    folder = folder.resolve()
    hosts: list[str] = []
    with suppress(OSError):
        hosts = json.loads((folder / DESCRIPTION).read_text())["hosts"]
    stop_processes(folder)
    for host in find_routes(hosts):
        change_route("del", host)
    _remove_shared_memory(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_shared_memory(folder: Path) -> None:
    """Remove the segments of servers that were killed. PostgreSQL itself removes them only at its next start."""
    ours = set()
    for file in folder.glob("*/postmaster.pid"):
        with suppress(OSError, IndexError, ValueError):
            key, identity = file.read_text().splitlines()[6].split()
            ours.add((int(key), int(identity)))
    for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
        key, identity, *_, attached = line.split()[:7]
        if (int(key), int(identity)) in ours and attached == "0":
            subprocess.run(["ipcrm", "-m", identity], check=False)


def guard(folder: Path, parent: int) -> None:
    """Wait until the parent process has ended, and clean up."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == parent:
        time.sleep(0.5)
    remove(folder)


if __name__ == "__main__":
    guard(Path(sys.argv[1]), int(sys.argv[2]))
