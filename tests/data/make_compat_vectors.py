"""Make compat_vectors.json with the packages themselves: pip install pals sqlalchemy-dlock django-pglock psycopg.

    python tests/data/make_compat_vectors.py            write the file
    python tests/data/make_compat_vectors.py --check    compare the file with what the installed packages give

No connection is made: each package computes its key before it asks the server for anything.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pals
import pglock
import sqlalchemy
from sqlalchemy_dlock.lock.postgresql import PostgresqlSadLockMixin

FILE = Path(__file__).with_name("compat_vectors.json")

NAMES = [
    *("a", "billing", "tenant-1", "a:b:c", "with space ", "line\nbreak", "nul\0inside", "unit\x1fseparator"),
    *("grüße", "caf\u00e9", "cafe\u0301", "日本語", "🐘🔒", "\U0010ffff", "x" * 10240),
]
APPS = ["myapp", "", "my.app", "straße", "🐘"]
BYTES = [b"", b"billing", "caf\u00e9".encode(), b"\x00\xff\xfe", bytes(range(256))]
INTEGERS = [0, 1, -1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63)]

# What `lock_keys_for(name)` of with_advisory_lock 7.5.0 answered under Ruby 3.1.2, without WITH_ADVISORY_LOCK_PREFIX.
# Release 4 has the same formula under the name `lock_keys`. Recorded, because a Python machine has no Ruby at hand.
RAILS = {
    "": (0, 0),
    "a": (1756872259, 0),
    "billing": (1814187178, 0),
    "tenant-1": (2079263231, 0),
    "a:b:c": (1202143472, 0),
    "with space ": (1847266552, 0),
    "line\nbreak": (800845341, 0),
    "grüße": (879643117, 0),
    "caf\u00e9": (414007989, 0),
    "cafe\u0301": (911280202, 0),
    "\u00e9": (235179326, 0),
    "e\u0301": (1286470445, 0),
    "日本語": (671830757, 0),
    "🐘🔒": (81585016, 0),
    "\U0010ffff": (2057969211, 0),
    "x" * 10240: (1748218123, 0),
}


def pals_vectors() -> list[dict[str, Any]]:
    """Ask pals."""

    def key(app_name: str, name: str) -> int:
        locker = pals.Locker(app_name, create_engine_callable=lambda: sqlalchemy.create_engine("postgresql+psycopg://"))
        return locker.lock(name).lock_num

    pairs = [("myapp", name) for name in ["", *NAMES]] + [(app, "billing") for app in APPS[1:]]
    return [{"app_name": app, "name": name, "value": str(key(app, name))} for app, name in pairs]


def dlock_vectors() -> list[dict[str, Any]]:
    """Ask sqlalchemy-dlock."""

    def vector(kind: str, written: str | int, name: str | bytes | int) -> dict[str, Any]:
        return {kind: written, "value": str(PostgresqlSadLockMixin(key=name).get_actual_key())}

    return [
        *(vector("name", name, name) for name in ["", *NAMES]),
        *(vector("bytes_hex", name.hex(), name) for name in BYTES),
        *(vector("integer", str(name), name) for name in INTEGERS),
    ]


def pglock_vectors() -> list[dict[str, Any]]:
    """Ask django-pglock."""

    def key(name: str) -> int:
        high, low = pglock.advisory_id(name)
        return high << 32 | low

    return [{"name": name, "value": str(key(name))} for name in NAMES]


def hex15_vectors() -> list[dict[str, Any]]:
    """Compute the hand-written key."""
    names = ["", *NAMES]
    return [{"name": n, "value": str(int(hashlib.sha256(n.encode()).hexdigest()[:15], 16))} for n in names]


def make() -> dict[str, Any]:
    """Return the content of the file."""
    return {
        "about": [
            "Keys that other libraries lock, on a little-endian machine; 64-bit values as strings.",
            "Written by make_compat_vectors.py, which says how; made_by names what computed them.",
        ],
        "pals": {"made_by": f"pals {version('pals')}: Locker(app_name).lock(name).lock_num", "vectors": pals_vectors()},
        "dlock": {
            "made_by": f"sqlalchemy-dlock {version('sqlalchemy-dlock')}: get_actual_key() of the PostgreSQL lock",
            "vectors": dlock_vectors(),
        },
        "pglock": {
            "made_by": f"django-pglock {version('django-pglock')}: pglock.advisory_id(name)",
            "vectors": pglock_vectors(),
        },
        "with_advisory_lock": {
            "made_by": "with_advisory_lock 7.5.0 under Ruby 3.1.2: lock_keys_for(name), recorded",
            "vectors": [{"name": name, "classid": pair[0], "objid": pair[1]} for name, pair in RAILS.items()],
        },
        "sha256_hex15": {
            "made_by": "int(hashlib.sha256(name.encode()).hexdigest()[:15], 16)",
            "vectors": hex15_vectors(),
        },
    }


def main() -> None:
    """Write or compare the file."""
    if sys.byteorder != "little":
        sys.exit("pals and sqlalchemy-dlock take the byte order of the host: run this on a little-endian machine")
    made = json.dumps(make(), indent=1, ensure_ascii=True) + "\n"
    if "--check" not in sys.argv:
        FILE.write_text(made, encoding="ascii")
    elif FILE.read_text(encoding="ascii") != made:
        sys.exit(f"{FILE.name} is not what the installed packages give")


if __name__ == "__main__":
    main()
