"""A server at the far end of a separate network, whose cable can be cut. Linux, root and `ip` only."""

from __future__ import annotations

import ctypes
import os
import random
import secrets
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from support.servers import OwnServer, own

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000


class Network:
    """Two ends and a switch: this machine, the switch's namespace, the server's namespace.

    Cutting switches the switch off. Both ends keep their link and receive nothing, as with a cable cut further away: no reset,
    no "unreachable", no loss of carrier.

    Attributes:
        address: of the server's end.
        namespace: of the server's end.
    """

    def __init__(self, stack: ExitStack) -> None:
        tag = secrets.token_hex(3)
        prefix, first = f"198.18.{random.randrange(256)}", 4 * random.randrange(64)
        self.address = f"{prefix}.{first + 2}"
        self.namespace, self._switch = f"pgf-s-{tag}", f"pgf-x-{tag}"
        for namespace in (self.namespace, self._switch):
            _ip(f"netns add {namespace}")
            stack.callback(_ip, f"netns del {namespace}")
        _ip(f"-n {self._switch} link add sw type bridge")
        for near in (
            f"link add pgf{tag} type veth peer near netns {self._switch}",
            f"addr add {prefix}.{first + 1}/30 dev pgf{tag}",
        ):
            _ip(near)
        _ip(f"link set pgf{tag} up")
        _ip(f"-n {self.namespace} link add eth0 type veth peer far netns {self._switch}")
        _ip(f"-n {self.namespace} addr add {self.address}/30 dev eth0")
        _ip(f"-n {self.namespace} link set eth0 up")
        for port in ("near", "far"):
            _ip(f"-n {self._switch} link set {port} master sw up")
        self.heal()

    def cut(self) -> None:
        """Let no packet through, in either direction."""
        _ip(f"-n {self._switch} link set sw down")

    def heal(self) -> None:
        """Let packets through again."""
        _ip(f"-n {self._switch} link set sw up")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Make this thread, and what it starts, part of the server's namespace."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"/run/netns/{self.namespace}", os.O_RDONLY)
        try:
            _enter(there)
            yield
        finally:
            _enter(home)
            os.close(home)
            os.close(there)


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, text=True)


class FarServer(OwnServer):
    """A server that runs in the namespace of a network and listens on its address."""

    def __init__(self, network: Network, **kwargs: Any) -> None:
        self.network = network
        self.host = network.address
        super().__init__(**kwargs)

    def start(self) -> None:
        """Start it at the far end: its process inherits the namespace of this thread."""
        with self.network.inside():
            super().start()


@contextmanager
def far_server(**kwargs: Any) -> Iterator[FarServer]:
    """Run a private server behind its own cable; its unix socket is there even while the cable is cut."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    with ExitStack() as stack:
        try:
            network = Network(stack)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are refused here: {error.stderr.strip()}")
        yield stack.enter_context(own(FarServer, network=network, **kwargs))
