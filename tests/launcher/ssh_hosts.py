"""Hosts for tests of runs over ssh: the system's ssh client reaches them at a server in a thread of the test.

A host has a name, a login and a folder of its own; its processes are processes of this machine. The server runs the
command of a session in a shell and, as sshd does, only closes its pipes when the connection ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fork_server import NEW_NETWORK
from namespace_hosts import HOSTS
from run_place import Place

SHELL_CHARACTERS = set("~$|&;<>()`*?")
STRETTO = f"{sys.executable} -m stretto.cli"


class SshHosts:
    """Hosts of these names at one ssh server, on loopback or in a network namespace, that `ssh NAME` reaches.

    `other` is the folder of another server, whose hosts the client reaches, too.
    """

    def __init__(
        self,
        folder: Path,
        address: str = "127.0.0.1",
        network: str = "",
        names: str = "a b c",
        other: str = "",
    ) -> None:
        self.folder, self.address, self.network = folder, address, network
        self.names, self.other = names, other
        self.commands: list[str] = []
        """Commands that sessions were started with."""
        self._sessions: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.connections: list[Any] = []
        self.is_refusing = False
        """True if the server refuses all keys."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Start the server, and put an ssh client that knows its hosts first into PATH."""
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(60)
        (self.folder / "known").write_text(f"[{self.address}]:{self.port} {(self.folder / 'host_key.pub').read_text()}")
        (self.folder / "config").write_text(self.config())
        (self.folder / "bin").mkdir()
        client = self.folder / "bin/ssh"
        client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/config "$@"\n')
        client.chmod(0o755)

    def _run(self) -> None:
        """Run the server in a thread, whose network is that of the host."""
        if self.network:
            with Path("/run/netns", self.network).open() as file:
                assert ctypes.CDLL(None).setns(file.fileno(), NEW_NETWORK) == 0
        self._loop.run_forever()

    def config(self) -> str:
        """Return the configuration of the ssh client."""
        return f"""
{f"Include {self.other}" if self.other else ""}
Host {self.names}
  HostName {self.address}
  Port {self.port}
Host nowhere
  HostName {self.address}
  Port 1
Host stranger
  HostName {self.address}
  Port {self.port}
  UserKnownHostsFile /dev/null
Host {self.names} nowhere stranger
  User tester
  IdentityFile {self.folder}/user_key
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {self.folder}/known
  GlobalKnownHostsFile /dev/null
"""

    async def _listen(self) -> int:
        import asyncssh

        hosts = self

        class Server(asyncssh.SSHServer):
            def connection_made(self, connection: Any) -> None:
                hosts.connections.append(connection)

            def begin_auth(self, username: str) -> bool:
                return True

            def public_key_auth_supported(self) -> bool:
                return True

            def validate_public_key(self, username: str, key: Any) -> bool:
                return not hosts.is_refusing and key.convert_to_public() == user_key

        user_key = asyncssh.read_public_key(self.folder / "user_key.pub")
        self._listener = await asyncssh.create_server(
            Server,
            self.address,
            0,
            server_host_keys=[str(self.folder / "host_key")],
            process_factory=self._serve,
            encoding=None,
        )
        return int(self._listener.get_port())

    async def _serve(self, session: Any) -> None:
        """Run the command of a session until it ends."""
        import asyncssh

        command = session.command
        self.commands.append(command)
        place = self.folder / f"host{len(self.commands)}"
        place.mkdir()
        words = shlex.split(command)
        is_plain = not SHELL_CHARACTERS & set(command) and words[0] == sys.executable
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        prefix = ["ip", "netns", "exec", self.network] if self.network else []
        process: subprocess.Popen[bytes] = subprocess.Popen(
            [*prefix, *(words if is_plain else ["sh", "-c", command])],
            cwd=place,
            env={**os.environ, "HOME": str(place), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            **pipes,  # type: ignore[call-overload]
        )
        self._sessions.append((command, process))
        try:
            await session.redirect(process.stdin, process.stdout, process.stderr)
            code = await self._loop.run_in_executor(None, process.wait)
            with suppress(OSError, asyncssh.Error):
                await session.stdout.drain()
                if code < 0:
                    session.exit_with_signal("KILL")
                else:
                    session.exit(code)
        finally:  # also if the connection is lost before the command ends
            await session.wait_closed()

    def pids(self) -> list[tuple[str, int]]:
        """Return the commands, each with its process."""
        return [(command, session.pid) for command, session in self._sessions]

    @property
    def sessions(self) -> list[subprocess.Popen[bytes]]:
        """The processes of the commands."""
        return [session for _, session in self._sessions]

    def break_connections(self) -> None:
        """Close the connections without a word to the clients or the commands."""
        for connection in self.connections:
            self._loop.call_soon_threadsafe(connection.abort)

    async def _end(self) -> None:
        self._listener.close()
        await self._listener.wait_closed()
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            _, tasks = await asyncio.wait(tasks, timeout=10)  # the connections and the commands have ended
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    def close(self) -> None:
        """End the sessions and the server."""
        self.break_connections()
        for process in self.sessions:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


@contextmanager
def _served(
    folder: Path, monkeypatch: pytest.MonkeyPatch, address: str = "127.0.0.1", network: str = "", **named: str
) -> Iterator[SshHosts]:
    if shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("there is no ssh client on this machine")
    hosts = SshHosts(folder, address, network, **named)
    hosts.start()
    monkeypatch.setenv("PATH", f"{hosts.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    try:
        yield hosts
    finally:
        hosts.close()


@pytest.fixture
def ssh_hosts(
    place: Place, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SshHosts]:
    """Yield hosts on loopback that the ssh client in PATH reaches."""
    with _served(tmp_path_factory.mktemp("ssh"), monkeypatch) as served:
        yield served


@pytest.fixture
def ssh_elsewhere(
    place: Place, hosts: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SshHosts]:
    """Yield hosts at 10.79.0.2, in the second network namespace, that the ssh client in PATH reaches from the first."""
    with _served(tmp_path_factory.mktemp("ssh"), monkeypatch, "10.79.0.2", HOSTS[1]) as served:
        yield served


@pytest.fixture
def ssh_servers(
    place: Place, three_hosts: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SshHosts]:
    """Yield host `s` at 10.79.0.3; `a`, `b` and `c` are at 10.79.0.2. The ssh client in PATH reaches all."""
    with _served(tmp_path_factory.mktemp("ssh"), monkeypatch, "10.79.0.2", HOSTS[1]) as workers:
        other = str(workers.folder / "config")
        folder = tmp_path_factory.mktemp("ssh")
        with _served(folder, monkeypatch, "10.79.0.3", HOSTS[2], names="s", other=other) as served:
            yield served
