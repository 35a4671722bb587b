"""The folders of a server, for its data, for the template that the data are copied from, and for the files of one run."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
from base64 import b64encode
from contextlib import suppress
from pathlib import Path

from pgfence.embedded import _process
from pgfence.errors import UnreachableError

PASSWORD_FILE = "pgfence_password"
_INITDB = ("-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions")
_PREFIX = "pgfence-pg-"
_LONGEST_SOCKET = 103
_PARTIAL = "partial-"
_ENTRIES = "pgfence_entries"
_UNUSED = 30 * 86400


def make_run_folder() -> tuple[Path, int]:
    """Return a new private folder for one run, and a descriptor of it whose lock shows that the run is in progress.

    Folders of runs that ended without cleaning up are removed first.
    """
    base = _find_base()
    for left in base.glob(f"{_PREFIX}*"):
        _remove_if_abandoned(left)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        # Another start may find the folder before it is locked and remove it, before or after it is opened here.
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            give(folder)
            return folder, lock
        os.close(lock)


def _find_base() -> Path:
    """Return the temporary folder, or /tmp if the path of a socket in it would be too long for the kernel."""
    base = tempfile.gettempdir()
    longest = f"{base}/{_PREFIX}12345678/.s.PGSQL.65535"
    return Path(base if len(os.fsencode(longest)) <= _LONGEST_SOCKET else "/tmp")


def _remove_if_abandoned(folder: Path) -> None:
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def give(path: Path) -> None:
    """Recursively change the owner of a path to the OS user that runs the server, if that is not the current user."""
    if user := _process.find_other_user():
        for each in (path, *path.rglob("*")):
            os.chown(each, user.pw_uid, user.pw_gid, follow_symlinks=False)


def create(data: Path, bindir: Path, version: str, run_folder: Path) -> None:
    """Create a new cluster in `data`, as a copy of the template if there is one, or else with initdb."""
    template = _find_template(bindir, version)
    data.mkdir(mode=0o700, exist_ok=True)
    if template is not None and _is_complete(template):
        shutil.copytree(template, data, copy_function=shutil.copy, dirs_exist_ok=True)
        give(data)
        return
    give(data)
    _run_initdb(data, bindir, run_folder)
    if template is not None:
        _publish(data, template)


def _find_template(bindir: Path, version: str) -> Path | None:
    program = (bindir / "initdb").stat()
    origin = repr((bindir, version, program.st_size, program.st_mtime_ns, _INITDB))
    digest = hashlib.sha256(origin.encode()).hexdigest()[:16]
    cache = _find_cache()
    return cache / f"pg-{version}-{digest}" if cache else None


def _find_cache() -> Path | None:
    """Return the folder for templates in the user's cache, or else one in the temporary folder, or else None."""
    # Without a home directory, "~" is not expanded, and the path is not absolute.
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    for place in (home / "pgfence", Path(tempfile.gettempdir()) / f"pgfence-{os.geteuid()}"):
        if place.is_absolute() and _is_private(place):
            return place
    return None


def _is_private(place: Path) -> bool:
    """Create a folder if needed, and return whether only this user can access it. New servers start with copies of its contents."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = place.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077


def _is_complete(template: Path) -> bool:
    """Return whether a template is complete. An incomplete template, for example one with deleted files, is removed."""
    try:
        os.utime(template)
        if int((template / _ENTRIES).read_text()) == _count(template):
            return True
    except FileNotFoundError:
        pass
    _remove(template)
    return False


def _count(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*"))


def _remove(template: Path) -> None:
    # The template is renamed first, so that a process that is copying it fails instead of copying only a part of it.
    aside = template.with_name(f"{_PARTIAL}{secrets.token_hex(8)}")
    with suppress(OSError):
        template.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _publish(data: Path, template: Path) -> None:
    """Save a copy as the template for the next start. An existing template is kept, and a copy in progress has another name."""
    partial = template.with_name(f"{_PARTIAL}{secrets.token_hex(8)}")
    try:
        for old in template.parent.iterdir():
            if time.time() - old.stat().st_mtime > _UNUSED:
                _remove(old)
        shutil.copytree(data, partial, copy_function=shutil.copy)
        (partial / _ENTRIES).touch()
        (partial / _ENTRIES).write_text(str(_count(partial)))
        partial.rename(template)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)


def _run_initdb(data: Path, bindir: Path, run_folder: Path) -> None:
    password = secrets.token_urlsafe(24)
    verifier = run_folder / "verifier"
    verifier.touch(mode=0o600)
    verifier.write_text(_build_verifier(password))
    give(verifier)
    words, options = _process.build_command([bindir / "initdb", "-D", data, *_INITDB, f"--pwfile={verifier}"])
    answer = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    verifier.unlink()
    if answer.returncode != 0:
        raise UnreachableError(
            f"initdb could not create the data directory '{data}': {answer.stderr.strip()}", retryable=False
        )
    (data / PASSWORD_FILE).touch(mode=0o600)
    (data / PASSWORD_FILE).write_text(password)
    give(data / PASSWORD_FILE)


def _build_verifier(password: str) -> str:
    """Return the SCRAM verifier of a password. One iteration is enough because the password is random."""
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, 1)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    return f"SCRAM-SHA-256$1:{_encode_base64(salt)}${_encode_base64(stored)}:{_encode_base64(server)}"


def _encode_base64(content: bytes) -> str:
    return b64encode(content).decode()


def flush_to_disk(data: Path, bindir: Path) -> None:
    """Flush a new cluster to the disk, because it was created without fsync."""
    words, options = _process.build_command([bindir / "initdb", "-D", data, "--sync-only"])
    subprocess.run(words, capture_output=True, check=False, **options)
