"""Who can reach the processes of a cluster that a session started on this machine."""

import asyncio
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import dask
import pytest
from distributed import Security
from distributed.comm import connect

from jobrunner import DefinitionError, Session, Task, TaskGroup, WorkspaceType
from jobrunner.worker import make_socket_directory

LOOPBACK = {"0100007F", "0" * 24 + "01000000"}  # as Linux writes 127.0.0.1 and ::1
STRANGER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
socket.socket(socket.AF_UNIX).connect(sys.argv[1])
"""


def listening(pid):
    """The addresses and ports at which a process listens, as Linux shows them."""
    if not Path("/proc/net/tcp").exists():
        return set()
    owned = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[i] for i in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in owned:
                found.add(local)
    return found


def test_only_its_owner_can_reach_a_local_cluster():
    before = listening(os.getpid())
    with Session.local(workers=1, threads_per_worker=1) as session:
        assert session.run(Task(lambda: 1)) == 1
        assert session.client.dashboard_link.startswith("http://127.0.0.1:")
        info = session.client.scheduler_info()
        addresses = [info["address"], *info["workers"]]
        paths = [Path(address.removeprefix("unix://127.0.0.1")) for address in addresses]
        for path in paths:
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert path.is_socket()
        for pid in (os.getpid(), *session.client.run(os.getpid).values()):
            hosts = {address.partition(":")[0] for address in listening(pid) - before}
            assert hosts <= LOOPBACK, "a port is open to other machines"
        if os.geteuid() == 0:
            command = [sys.executable, "-S", "-c", STRANGER, str(paths[0])]
            refused = subprocess.run(command, capture_output=True, text=True, check=False)
            assert "PermissionError" in refused.stderr
    assert not paths[0].parent.exists()


def test_a_cluster_without_processes_is_open_to_no_other_machine():
    before = listening(os.getpid())
    with Session.local(workers=1, threads_per_worker=1, processes=False) as session:
        hosts = {address.partition(":")[0] for address in listening(os.getpid()) - before}
        assert hosts <= LOOPBACK
        host, port = session.client.dashboard_link.split("/")[2].split(":")
        socket.create_connection((host, int(port)), timeout=10).close()


def test_a_socket_fits_into_a_long_temporary_directory(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        for length in range(70, 90):
            parent = base + "/".ljust(length - len(base), "x")
            os.mkdir(parent)
            monkeypatch.setattr(tempfile, "tempdir", parent)
            with make_socket_directory() as directory:
                assert len(f"{directory}/12345678") <= 103  # of macOS; Linux takes 4 more


def test_a_connection_waits_for_a_place_in_a_full_queue():
    async def connect_later(path, queued):
        connecting = asyncio.ensure_future(connect(f"unix://127.0.0.1{path}", timeout=10))
        await asyncio.wait((connecting,), timeout=0.05)
        assert not connecting.done()
        queued.accept()[0].close()  # now there is a place
        opened, _ = await asyncio.get_running_loop().run_in_executor(None, queued.accept)
        opened.close()
        with pytest.raises(OSError, match="closed|handshake"):
            await connecting

    with make_socket_directory() as directory, socket.socket(socket.AF_UNIX) as queued:
        path = f"{directory}/queued"
        queued.bind(path)
        queued.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(path)
            asyncio.run(connect_later(path, queued))


def test_another_protocol_is_refused():
    with (
        dask.config.set({"jobrunner.local-protocol": "http"}),
        pytest.raises(DefinitionError, match="local-protocol .* must be unix or tcp; got 'http'"),
    ):
        Session.local(workers=1)


@pytest.mark.nightly
def test_a_cluster_that_requires_tls_lets_only_holders_of_its_certificate_in(tmp_path):
    pytest.importorskip("cryptography", reason="it makes certificates: pip install cryptography")
    security = Security.temporary()
    keys = {}
    for role in ("client", "scheduler", "worker"):
        for kind in ("key", "cert"):
            path = tmp_path / f"{role}.{kind}"
            path.write_text(getattr(security, f"tls_{role}_{kind}"))
            keys[f"distributed.comm.tls.{role}.{kind}"] = str(path)
    (tmp_path / "ca").write_text(security.tls_ca_file)
    required = {"distributed.comm.require-encryption": True}
    with (
        dask.config.set({**required, "distributed.comm.tls.ca-file": str(tmp_path / "ca"), **keys}),
        Session.local(workers=1, threads_per_worker=1) as session,
    ):
        with TaskGroup(workspace_type=WorkspaceType.GLOBAL) as group:
            Task(lambda: 1, outputs="x", node="a")
        session.run(group)
        info = session.client.scheduler_info()
        for address in (info["address"], *info["workers"]):
            assert address.startswith("tls://")
            other = Security.temporary().get_connection_args("client")
            with pytest.raises(OSError, match=r"certificate|closed|unknown ca|Timed out"):
                asyncio.run(connect(address, timeout=2, **other))
