"""A real Celery worker in a separate process, with messages and results in files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from celery import Celery

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_CONFIG = "celeryconfig"


class Queue:
    """What a client and its workers have in common: a folder that stands for the broker.

    Attributes:
        environment: of whoever sends, and of workers: programs that say nothing of a broker use this one.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        for name in ("messages", "results"):
            (folder / name).mkdir()
        settings = {
            "broker_url": "filesystem://",
            "broker_transport_options": {
                "control_folder": str(folder / "control"),
                "data_folder_in": str(folder / "messages"),
                "data_folder_out": str(folder / "messages"),
                "polling_interval": 0.05,
            },
            "result_backend": f"file://{folder / 'results'}",
            "worker_enable_remote_control": False,
            "worker_lost_wait": 0.2,
        }
        (folder / f"{_CONFIG}.py").write_text("\n".join(f"{name} = {value!r}" for name, value in settings.items()))
        self.environment = {**environment, "CELERY_LOADER": "default", "CELERY_CONFIG_MODULE": _CONFIG}
        self._client = Celery("client", set_as_current=False, config_source=settings)

    def send(self, task: str, *arguments: Any) -> Any:
        """Send a task by its name and return its AsyncResult."""
        return self._client.send_task(task, arguments)

    def write(self, module: str, code: str) -> None:
        """Write a module that workers and clients of this queue can import."""
        (self._folder / f"{module}.py").write_text(code)

    def run(self, code: str) -> str:
        """Run a program that uses the queue, and return what it prints."""
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, cwd=self._folder, env=self.environment, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    @contextmanager
    def worker(self, app: str) -> Iterator[None]:
        """Run a prefork worker with two children, until the block ends.

        Args:
            app: as in `celery --app`, e.g. "celery_tasks:app".
        """
        options = ["--pool=prefork", "--concurrency=2", "--without-gossip", "--without-mingle", "--without-heartbeat"]
        command = [sys.executable, "-m", "celery", f"--app={app}", "worker", *options, "--loglevel=INFO"]
        with (self._folder / "worker.log").open("wb") as log:
            running = subprocess.Popen(
                command, cwd=self._folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                yield
            finally:
                os.killpg(running.pid, signal.SIGKILL)  # asked to end, it takes five seconds
                running.wait()

    def log(self) -> str:
        """Return what the worker has written."""
        return (self._folder / "worker.log").read_text()
