"""Workers that join a running run, from this or another machine.

`stretto run --listen` writes the address of the coordinator and a key pair to `join.key`. A launcher that has this file
asks the coordinator for numbers, keys, options and, on a machine that does not see the run directory, the code.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from stretto.errors import LaunchError, LogError, explain
from stretto.launcher.code_archive import packed, unpack
from stretto.launcher.endpoints import Servers
from stretto.launcher.entry import check
from stretto.launcher.layout_checks import indivisible
from stretto.launcher.listeners import is_address
from stretto.launcher.process_specs import ProcessPlan
from stretto.launcher.signals import end_with_input
from stretto.membership.invitations import Invitation
from stretto.notices import say
from stretto.process_config import KeyTexts
from stretto.run_config import Output, RunConfig, decode_path
from stretto.run_dir import check_owner, cores, make_folder, versions
from stretto.whole_files import written_whole

if TYPE_CHECKING:
    from stretto.launcher.join_client import JoinClient

JOIN_KEY = "join.key"
BY_KEY = "stretto join HOST:PORT --key FILE"
CODE = "code"
"""Directory with the received code in the run directory of a joining launcher."""
OF_THE_LAUNCHER = ("hosts", "server_hosts", "on", "resources", "out", "faults", "copy_to", "secret_file", "wait_for")
"""Options that do not concern launchers that join the run."""
SECRET = re.compile("[0-9a-f]{64}", re.ASCII)
OTHERS = stat.S_IRWXG | stat.S_IRWXO


class JoinKey(msgspec.Struct, frozen=True):
    """Address of the coordinator, and the keys with which a launcher asks it to join the run.

    `first` is the first of the numbers reserved for its workers, if the launcher of the run has started it: it ends
    then when its standard input ends. `replaces` is True if it replaces a launcher that has been lost.
    """

    address: str
    keys: KeyTexts | None
    first: int | None = None
    replaces: bool = False


@dataclass(frozen=True)
class JoinRequest:
    """Options of `stretto join`. `run` is the folder of the run; with `key` it is an address, host:port."""

    run: str
    workers: int = 1
    key: Path | None = None
    script: Path | None = None
    threads: int | None = None
    output: Output = "none"
    restarts: int = 3
    first: int | None = None
    """First of the numbers reserved for these workers, if there are any."""
    out: Path | None = None
    """Run folder of these workers on a machine that does not see that of the run."""
    workdir: Path | None = None
    """Working folder of the script there."""


def write_join_key(folder: Path, servers: Servers) -> Path:
    """Write `join.key`, whole, readable by its owner only. Raises LogError if the disk does not take it."""
    assert servers.joined_at is not None
    path = folder / JOIN_KEY
    text = msgspec.json.encode(JoinKey(servers.joined_at, servers.keys_of(b"joining"))) + b"\n"
    try:
        with written_whole(path) as part:
            part.touch(0o600, exist_ok=False)
            part.write_bytes(text)
    except OSError as error:
        raise LogError(f"{path} cannot be written: {error.strerror}") from error
    return path


def invited(key: Path, servers: Servers) -> list[str]:
    """Return the command for other machines, and a sentence on encryption."""
    line = f"on other machines, with a copy of {key}: stretto join {servers.joined_at} --key {key.name}"
    if not servers.is_encrypted:
        return [line, "no traffic is encrypted, and a host that reaches the ports can change or end the run"]
    return [line, "all traffic between workers and services is encrypted; the key lets its holder in"]


def route(options: RunConfig, servers: Servers) -> list[str]:
    """Return a sentence on the ports that other machines have to reach."""
    if options.relay:
        return [f"workers of different hosts exchange through the relay at {servers.relay_at}"]
    if servers.relay_at is None or not options.elastic:
        return []
    ports = f"on the ports {options.ports}" if options.ports else "on free ports (--ports limits them)"
    who = "workers connect with the parameter server" if servers.addresses else "workers of different hosts connect"
    if not servers.is_encrypted:
        return [f"{who} {ports}" if servers.addresses else f"{who} on free ports"]
    return [f"{who} {ports}, or where these are closed through {servers.relay_at}, which suffices"]


def invitation_of(
    options: RunConfig, services: tuple[str, ...], secret: Sequence[str] | None
) -> Callable[[tuple[int, ...]], Invitation]:
    """Return the function that makes an invitation to a run for workers of these numbers.

    Workers that a resumed run begins with must know that it is resumed: they receive the state that another one reads.
    """
    script = options.script if options.module else options.script.parent.resolve() / options.script.name
    workers = options.initial_workers
    options = replace(
        options, script=script, workers=workers, scaled_workers=workers, min_workers=1, **dict.fromkeys(OF_THE_LAUNCHER)
    )
    encoded = msgspec.json.encode(replace(options, announced=0, launched_from=os.getcwd()), enc_hook=str)

    def invite(numbers: tuple[int, ...]) -> Invitation:
        return Invitation(numbers, services, encoded, versions(), _keys_of(numbers, secret))

    return invite


def _keys_of(numbers: tuple[int, ...], secret: Sequence[str] | None) -> dict[str, KeyTexts]:
    """Return the keys of a joining launcher and of its workers, and those for the relay, by role."""
    from stretto.security import RELAY, run_keys  # imports zmq

    if (keys := run_keys(secret, 0)) is None:
        return {}
    launcher = [b"launcher %d" % min(numbers)] if numbers else []
    roles = [RELAY, *launcher, *(b"worker %d" % number for number in numbers)]
    return {role.decode(): keys.client(role).texts for role in roles}


def packed_code(options: RunConfig, secrets: Sequence[str]) -> bytes:
    """Return the code of a run as an archive: the folder of its script, without files with one of the run's secrets.

    Raises LaunchError.
    """
    if options.module:
        problem, got = "the code of a module is not sent to other machines", f"-m {options.script}"
        expected = "a run of a script"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type="--script PATH, as stretto join allows"))
    return packed(options.script, secrets)


def plan_of_join(request: JoinRequest, note: Callable[[str], None] = say) -> ProcessPlan:
    """Return the plan of the joining workers; `note` shows a line. Raises LaunchError if they cannot join the run.

    If the launcher of the run has started this one, a signal ends this process when its standard input ends.
    """
    from stretto.launcher.join_client import JoinClient, closed_ports  # imports zmq
    from stretto.security import AGENT, JOINING

    if request.workers < 1:
        problem, expected = f"{request.workers} workers cannot join", "at least 1"
        raise LaunchError(explain(problem, got=f"-n {request.workers}", expected=expected, to_type="-n 2"))
    key = _read(request)
    if key.first is not None:
        end_with_input()
    note(f"joining the run {request.run}")
    with JoinClient(key.address, key.keys, JOINING if key.first is None else AGENT) as client:
        first = request.first if key.first is None else key.first
        invitation = client.ask(request.workers, first, key.replaces)
        check_versions(invitation.versions)
        options = msgspec.json.decode(invitation.options, type=RunConfig, dec_hook=decode_path)
        if not invitation.numbers:
            raise indivisible(request.workers, options.ranks, f"stretto join {request.run} -n {{}}")
        folder, script, workdir = _place(request, options, client, note)
        config = replace(
            options,
            script=script,
            host=client.own_address,
            threads=request.threads or max(1, cores() // request.workers),
            output=request.output,
            restarts=request.restarts,
        )
    check(config.script, config.module)
    sees_run = request.key is None
    servers = Servers(elsewhere=(key.address, *invitation.services[1:]), given=invitation.keys)
    closed = closed_ports(invitation.services[1:]) if invitation.keys else []
    if closed:
        note(f"this machine does not reach {', '.join(closed)}: the parameter server is reached through {key.address}")
    return ProcessPlan(
        config,
        folder,
        None,
        servers,
        joining=invitation.numbers,
        incarnation=invitation.incarnation,
        sees_run=sees_run,
        workdir=workdir,
        servers_by_relay=bool(closed),
    )


def _place(
    request: JoinRequest, options: RunConfig, client: JoinClient, note: Callable[[str], None]
) -> tuple[Path, Path, Path | None]:
    """Return the run directory of the joining workers, their script, and its working folder if it is another one.

    The code is received where it is needed. The working folder is then the place in it that the launcher's has in the
    folder of its script, if it is there.
    """
    script = request.script.absolute() if request.script is not None else options.script
    workdir = request.workdir.resolve() if request.workdir is not None else None
    if workdir is not None and not workdir.is_dir():
        problem, expected = f"there is no folder {request.workdir}", "a folder, in which the script finds its data"
        got, to_type = f"--workdir {request.workdir}", "--workdir ."
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))
    if request.key is None:
        return Path(request.run), script, workdir
    code = client.code(note) if request.script is None and not options.module else None
    folder = make_folder(f"joined-{options.name}", request.out, datetime.now())
    if code is not None:
        received = folder.resolve() / CODE
        note(f"received the code of the run, {len(code) / 1e6:.1f} MB packed, in {received}")
        if stayed := unpack(code, received):
            note(f"not sent, since they look like secrets: {stayed}")
        launched_from = Path(options.launched_from or "/")
        if workdir is None and launched_from.is_relative_to(script.parent):
            workdir = received / launched_from.relative_to(script.parent)
            workdir.mkdir(parents=True, exist_ok=True)
        script = received / script.name
    return folder, script, workdir


def check_versions(there: Mapping[str, str]) -> None:
    """Raise LaunchError for another version of Stretto; print a notice for another one of what the script runs on."""
    here = versions()
    for name in there.keys() & here.keys() - {"stretto"}:
        if there[name] != here[name]:
            say(f"the run has {name} {there[name]} and this machine {here[name]}; results may differ")
    if there["stretto"] != here["stretto"]:
        problem, expected = "this machine has another version of Stretto than the run", there["stretto"]
        to_type = f"pip install stretto=={expected}"
        raise LaunchError(explain(problem, got=here["stretto"], expected=expected, to_type=to_type))


def _read(request: JoinRequest) -> JoinKey:
    path = Path(request.run) / JOIN_KEY if request.key is None else request.key
    try:
        if request.key is None:
            check_owner(Path(request.run), "stretto join", BY_KEY)
        flags = os.O_NOFOLLOW if request.key is None else 0
        key = msgspec.json.decode(_content(path, flags), type=JoinKey)
    except FileNotFoundError:
        raise _missing(request, path) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            problem, expected = f"the key {path} is a link", "the file that stretto run --listen has written"
            raise LaunchError(explain(problem, got="a link", expected=expected, to_type=BY_KEY)) from error
        raise LaunchError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        problem, expected = f"{path} is not a key of a run: {error}", f"the {JOIN_KEY} of `stretto run --listen`"
        to_type = f"stretto join RUN, or {BY_KEY}"
        raise LaunchError(explain(problem, got="another file", expected=expected, to_type=to_type)) from error
    return key if request.key is None else replace(key, address=_address(request.run))


def given_secret(path: Path) -> str:
    """Return the secret of a run from a file of its own. Raises LaunchError."""
    try:
        text = _content(path).decode(errors="replace").strip()
    except OSError as error:
        raise LaunchError(f"the secret {path} cannot be read: {error.strerror}") from error
    if not SECRET.fullmatch(text):
        problem, expected = f"{path} holds no secret of a run", "64 hexadecimal digits"
        to_type = f"(umask 077; openssl rand -hex 32 > {path})"
        raise LaunchError(explain(problem, got=f"{len(text)} characters", expected=expected, to_type=to_type))
    return text


def _content(path: Path, flags: int = 0) -> bytes:
    """Return the content of a key file, or of standard input for `-`. Raises LaunchError for a file that others see.

    A line of standard input suffices, since a launcher that has started this one keeps its end open.
    """
    if str(path) == "-":
        return sys.stdin.buffer.readline()
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
        status = os.fstat(file.fileno())
        if status.st_mode & OTHERS or status.st_uid not in (os.geteuid(), 0):
            problem, expected = (
                f"the key {path} may be known to others",
                "a file of your own that no other user can read",
            )
            got = f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}"
            raise LaunchError(explain(problem, got=got, expected=expected, to_type=f"chmod 600 {path}"))
        return file.read()


def _missing(request: JoinRequest, path: Path) -> LaunchError:
    expected, to_type = "the folder of a run with --listen, on a disk that both machines see", "stretto join runs/RUN"
    if request.key is not None:
        problem, expected = f"there is no key {path}", f"a copy of the {JOIN_KEY} in the folder of the run"
        to_type = f"stretto join {request.run} --key {JOIN_KEY}"
    elif is_address(request.run):
        problem, to_type = "an address is joined with a key", f"stretto join {request.run} --key {JOIN_KEY}"
    else:
        folder = Path(request.run)
        problem = f"{folder} cannot be joined" if folder.is_dir() else f"there is no run {folder}"
    return LaunchError(explain(problem, got=f"no {path}", expected=expected, to_type=to_type))


def _address(text: str) -> str:
    if not is_address(text):
        problem, expected = (
            "with --key, the run is named by its address",
            "HOST:PORT, as `stretto run --listen` prints it",
        )
        raise LaunchError(
            explain(problem, got=text, expected=expected, to_type="stretto join 10.0.0.1:7878 --key FILE")
        )
    return text
