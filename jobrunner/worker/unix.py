"""Dask's communication over Unix domain sockets, in a directory that only its owner can enter.

Anyone who can connect to a worker or scheduler can run code there. Ports of this machine are open to
all its users; such a directory is not, and needs no certificates.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import dask
from distributed.comm.core import BaseListener, Comm, CommClosedError, Connector
from distributed.comm.registry import Backend, backends
from distributed.comm.tcp import MAX_BUFFER_SIZE, TCP
from tornado import netutil
from tornado.ioloop import IOLoop
from tornado.iostream import IOStream

SCHEME = "unix"
HOST = "127.0.0.1"
"""Addresses begin with it, and then name a socket's path: Dask takes a machine from an address."""

_LONGEST_DIRECTORY = 103 - len("/jobrunner-12345678/12345678")  # macOS: paths have up to 103 bytes


def make_socket_directory() -> tempfile.TemporaryDirectory[str]:
    """Make a directory for the sockets of one cluster, which only this user can enter."""
    parent = os.path.realpath(tempfile.gettempdir())
    if ":" in parent or len(os.fsencode(parent)) > _LONGEST_DIRECTORY:
        parent = "/tmp"
    return tempfile.TemporaryDirectory(prefix="jobrunner-", dir=parent)


class _Socket(socket.socket):
    """A socket to which Dask's options of TCP mean nothing."""

    def setsockopt(self, level: int, *option: Any) -> None:
        if level != socket.SOL_TCP:
            super().setsockopt(level, *option)


def _stream(opened: socket.socket) -> IOStream:
    return IOStream(_Socket(fileno=opened.detach()), max_buffer_size=MAX_BUFFER_SIZE)


def _path(loc: str) -> str:
    return f"/{loc.partition('/')[2]}"


class UnixConnector(Connector):
    """Connects to a socket."""

    async def connect(self, address: str, deserialize: bool = True, **options: Any) -> Comm:
        """Connect to the socket of an address."""
        opened = socket.socket(socket.AF_UNIX)
        try:
            opened.setblocking(False)
            opened.connect(_path(address))  # connects at once, or fails: then Dask tries again
        except BaseException:
            opened.close()
            raise
        return TCP(_stream(opened), f"{SCHEME}://{HOST}", f"{SCHEME}://{address}", deserialize)


class UnixListener(BaseListener):
    """Listens at a new socket in the directory of an address."""

    prefix = SCHEME
    listen_address = contact_address = ""  # Dask declares properties

    def __init__(
        self,
        loc: str,
        comm_handler: Callable[[Comm], Awaitable[None]],
        deserialize: bool = True,
        allow_offload: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        directory = loc.rpartition(":")[0] or loc  # Dask appends a port
        loc = f"{directory}/{secrets.token_hex(4)}"
        self.listen_address = self.contact_address = f"{SCHEME}://{loc}"
        self._path = _path(loc)
        self._comm_handler = comm_handler
        self._deserialize, self._allow_offload = deserialize, allow_offload

    async def start(self) -> None:
        """Listen."""
        backlog = int(dask.config.get("distributed.comm.socket-backlog"))
        self._socket = netutil.bind_unix_socket(self._path, backlog=backlog)
        self._refuse = netutil.add_accept_handler(self._socket, self._accept)

    def stop(self) -> None:
        """Listen no more."""
        self._refuse()
        self._socket.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    def _accept(self, connection: socket.socket, address: Any) -> None:
        IOLoop.current().add_callback(self._handle, connection)

    async def _handle(self, connection: socket.socket) -> None:
        if self._socket.fileno() < 0:  # stopped meanwhile: nobody would end the handshake
            connection.close()
            return
        machine = f"{SCHEME}://{HOST}"
        comm = TCP(_stream(connection), self.contact_address, machine, self._deserialize)
        comm.allow_offload = self._allow_offload
        with suppress(CommClosedError):  # before the end of the handshake
            await self.on_connection(comm)
            await self._comm_handler(comm)


class UnixBackend(Backend):
    """Addresses ``unix://127.0.0.1/path/of/a/socket``."""

    def get_connector(self) -> Connector:
        """Return a connector."""
        return UnixConnector()

    def get_listener(self, loc: str, handle_comm: Any, deserialize: bool, **options: Any) -> Any:
        """Return a listener in the directory `loc`."""
        return UnixListener(loc, handle_comm, deserialize, **options)

    def get_address_host(self, loc: str) -> str:
        """Return this machine."""
        return HOST

    def resolve_address(self, loc: str) -> str:
        """Return the address as it is."""
        return loc

    def get_local_address_for(self, loc: str) -> str:
        """Return the directory of a socket."""
        return os.path.dirname(loc)


backends.setdefault(SCHEME, UnixBackend())
