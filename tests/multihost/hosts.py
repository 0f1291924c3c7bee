"""Hosts on one machine: network, process, mount, host-name and IPC namespaces of their own, joined by a bridge.

Nothing of it is named: a namespace lives as long as a process in it, and every process below is killed by the kernel
when the test run ends, however it ends. So runs side by side do not meet, and none leaves anything.

    switch: a network namespace with the bridge, one port per host, and the slow links between port and bridge
    host:   eth0 <-> its port; sshd as process 1; a home, a /tmp, a /dev/shm and a hosts file of its own
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

START_DEADLINE_S = 10.0
KILL_DEADLINE_S = 10.0
COMMAND_TIMEOUT_S = 20.0
BRIDGE = "lan"
REPOSITORY = Path(__file__).parents[2]
SLOW_LINK = Path(__file__).with_name("slow_link.py")
PROGRAMS = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
    "rsync": "rsync",
}

# What a host does before it is one: its own name, memory, /tmp, users and name resolution; then sshd, which reaps.
_BOOT = """
set -e
hostname {name}
mount -t tmpfs tmpfs /dev/shm
mount --bind /tmp /mnt
mount -t tmpfs tmpfs /tmp
for shared in {shared}; do mkdir "/tmp/$shared"; mount --bind "/mnt/$shared" "/tmp/$shared"; done
mkdir -p /run/sshd
mount --bind {lan}/hosts /etc/hosts
mount --bind {folder}/passwd /etc/passwd
[ ! -e /etc/resolv.conf ] || mount --bind {folder}/resolv.conf /etc/resolv.conf
touch {folder}/up
exec {sshd} -D -e -f {folder}/sshd_config
"""
_SSHD = """
HostKey {lan}/host_key
AuthorizedKeysFile {folder}/home/.ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
UseDNS no
PidFile none
MaxStartups 64
PrintMotd no
SetEnv {environment}
"""


def missing() -> str:
    """What this machine lacks to have such hosts; empty when it lacks nothing."""
    if os.geteuid() != 0:
        return "root (network namespaces)"
    absent = {package for program, package in PROGRAMS.items() if _program(program) is None}
    if absent:
        return " and ".join(sorted(absent))
    if not os.access("/dev/net/tun", os.W_OK):
        return "a writable /dev/net/tun"
    spaces = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
    bridge = f"ip link add {BRIDGE} type bridge && ip link add v0 type veth peer name v1"
    tried = subprocess.run([*spaces, "sh", "-c", bridge], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    return f"namespaces, a bridge and veth: {tried.stderr.strip()}" if tried.returncode else ""


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _spawn(*command: str, log: Path) -> subprocess.Popen[bytes]:
    """A process that the kernel kills when the thread that started it, the test's, is gone."""
    with log.open("ab") as output:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _must(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def wait_until(what: str, holds: object, timeout_s: float, poll_s: float = 0.02) -> float:
    """Wait until ``holds()``; the seconds it took. AssertionError naming ``what`` when it does not come."""
    assert callable(holds)
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(poll_s)
    return time.monotonic() - start


@dataclass(frozen=True)
class Traffic:
    """Bytes of a host's eth0 since it was powered on."""

    sent: int
    received: int


class Lan:
    """The switch and its hosts. ``close`` ends them all."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None, shared: Iterable[Path] = ()) -> None:
        """environment: of everything that runs on the hosts, beside HOME and the locale. shared: what they see of
        this machine's /tmp, beside the program's own files; the rest of the file system they all see."""
        self.folder = folder
        needed = [folder, REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), *shared]
        tops = {path.parts[2] for path in map(Path.absolute, needed) if path.parts[:2] == ("/", "tmp")}
        self.shared = " ".join(map(shlex.quote, sorted(tops)))
        self.environment = {"LANG": "C.UTF-8"} | dict(environment or {})
        self.hosts: dict[str, Host] = {}
        folder.mkdir(parents=True)
        (folder / "hosts").write_text("127.0.0.1 localhost\n")
        for key in ("host_key", "user_key"):
            _must("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key))
        self._switch = _spawn("unshare", "--net", "sleep", "infinity", log=folder / "switch.log")
        try:
            wait_until("the switch", lambda: _is(self._switch.pid, "sleep"), START_DEADLINE_S)
            self.ip("link", "add", BRIDGE, "type", "bridge")
            self.ip("link", "set", BRIDGE, "up")
        except BaseException:
            self.close()
            raise

    def add(self, name: str, address: str) -> Host:
        """A host, powered on. address: IPv4, in a /24 with the others."""
        with (self.folder / "hosts").open("a") as hosts:
            hosts.write(f"{address} {name}\n")
        self.hosts[name] = Host(self, name, address)
        self.hosts[name].power_on()
        return self.hosts[name]

    def ip(self, *arguments: str) -> str:
        """Run ``ip`` on the switch."""
        return _must("nsenter", "--net", "-t", str(self._switch.pid), "ip", *arguments)

    @contextmanager
    def slow(self, host: Host, delay_ms: float = 0.0, mbit_s: float = 0.0, loss: float = 0.0) -> Iterator[None]:
        """Make the link of ``host`` late, narrow or lossy, each way: see slow_link.py."""
        near, far, beside = f"n{host.port}", f"f{host.port}", f"b{host.port}"
        options = [f"--delay-ms={delay_ms}", f"--mbit-s={mbit_s}", f"--loss={loss}", near, far]
        into = ["nsenter", "--net", "-t", str(self._switch.pid)]
        log = self.folder / "slow.log"
        process = _spawn(*into, sys.executable, "-S", str(SLOW_LINK), *options, log=log)
        try:
            wait_until(f"the slow link: {log.read_text()}", lambda: near in self.ip("link"), START_DEADLINE_S)
            self.ip("link", "add", beside, "type", "bridge")
            for device, bridge in ((near, beside), (far, BRIDGE), (host.port, beside)):
                self.ip("link", "set", device, "master", bridge, "up")
            self.ip("link", "set", beside, "up")
            yield
            assert process.poll() is None, f"the slow link ended: {log.read_text()}"
        finally:
            if host.on:
                self.ip("link", "set", host.port, "master", BRIDGE)
            process.kill()
            process.wait()
            with suppress(AssertionError):
                self.ip("link", "del", beside)

    def pids(self) -> list[int]:
        """The processes that everything hangs on: the switch, and each host's first and what booted it."""
        booted = [pid for host in self.hosts.values() for pid in host.pids()]
        return [self._switch.pid, *booted]

    def close(self) -> None:
        """Power off every host, then the switch. Idempotent."""
        for host in self.hosts.values():
            host.power_off()
        self._switch.kill()
        self._switch.wait()


class Host:
    """One host; made by `Lan.add`."""

    def __init__(self, lan: Lan, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.folder = lan.folder / name
        self.home = self.folder / "home"
        self.port = f"p{len(lan.hosts)}"
        self._mac = f"02:00:00:00:00:{len(lan.hosts) + 1:02x}"  # a host comes back with the card it had
        self.environment = lan.environment | {"HOME": str(self.home)}
        self._lan = lan
        self._boot: subprocess.Popen[bytes] | None = None
        self._init: psutil.Process | None = None
        self._furnish()

    @property
    def on(self) -> bool:
        """It has power."""
        return self._boot is not None

    def power_on(self) -> None:
        """Boot; returns when sshd listens."""
        assert not self.on
        (self.folder / "up").unlink(missing_ok=True)
        sshd = _program("sshd")
        assert sshd is not None
        lan = self._lan
        script = _BOOT.format(name=self.name, folder=self.folder, lan=lan.folder, sshd=sshd, shared=lan.shared)
        spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._init = None
        self._boot = _spawn("unshare", *spaces, "sh", "-c", script, log=self.folder / "boot.log")
        try:
            wait_until(f"{self.name} is up", self._is_up, START_DEADLINE_S)
            self._connect()
            wait_until(f"sshd of {self.name}", lambda: ":22 " in self.run("ss", "-ltnH"), START_DEADLINE_S)
        except BaseException:
            print((self.folder / "boot.log").read_text()[-2000:])
            self.power_off()
            raise

    def power_off(self) -> None:
        """Cut the cable, then kill every process: nobody hears a connection close. Idempotent."""
        boot, self._boot = self._boot, None
        if boot is None:
            return
        with suppress(AssertionError):
            self._lan.ip("link", "set", self.port, "down")
        if self._init is None:
            boot.kill()
        else:
            with suppress(psutil.NoSuchProcess):
                self._init.send_signal(signal.SIGKILL)
        try:
            boot.wait(KILL_DEADLINE_S)  # it waits for process 1, which waits for all others
        finally:
            boot.kill()
            boot.wait()
        with suppress(AssertionError):  # gone with the namespace, sooner or later
            self._lan.ip("link", "del", self.port)

    def unplug(self) -> None:
        """Partition: the cable is out, the processes go on."""
        self._lan.ip("link", "set", self.port, "down")

    def plug(self) -> None:
        """The cable is in again."""
        self._lan.ip("link", "set", self.port, "up")

    def traffic(self) -> Traffic:
        """What crossed eth0."""
        stats = json.loads(self.run("ip", "-j", "-s", "link", "show", "eth0"))[0]["stats64"]
        return Traffic(sent=stats["tx"]["bytes"], received=stats["rx"]["bytes"])

    def command(self, *command: str) -> list[str]:
        """A command as it is to be run from outside, to run on this host."""
        assert self._init is not None
        pairs = [f"{key}={value}" for key, value in self.environment.items()]
        path = f"PATH={Path(sys.prefix) / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        enter = ["nsenter", "-t", str(self._init.pid), "--net", "--mount", "--uts", "--ipc", "--pid"]
        with_enter = ["setpriv", "--pdeathsig", "KILL"]  # the process itself is a child of the one that enters
        return [*enter, *with_enter, "env", "-i", path, *pairs, *command]

    def run(self, *command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run on this host; returns stdout. AssertionError with all output when it fails."""
        done = subprocess.run(self.command(*command), capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, f"{self.name}: {' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        """All that runs on this host."""
        assert self._init is not None
        inside = os.stat(f"/proc/{self._init.pid}/ns/pid").st_ino
        return [p for p in psutil.process_iter() if _namespace(p.pid) == inside]

    def pids(self) -> list[int]:
        """What booted it, and its process 1."""
        assert self._boot is not None
        assert self._init is not None
        return [self._boot.pid, self._init.pid]

    def _furnish(self) -> None:
        """The files of the host: home with key and environment, sshd's settings."""
        lan = self._lan.folder
        ssh = self.home / ".ssh"
        ssh.mkdir(parents=True)
        shutil.copy(lan / "user_key", ssh / "id_ed25519")
        shutil.copy(lan / "user_key.pub", ssh / "authorized_keys")
        (self.home / "paceline").mkdir()
        (self.home / "paceline" / ".venv").symlink_to(sys.prefix)
        (self.folder / "resolv.conf").touch()
        # Everything that asks where root's home is must hear the same: $HOME, the shell's ~ and ssh's.
        users = (line.split(":") for line in Path("/etc/passwd").read_text().splitlines())
        passwd = [":".join([*user[:5], str(self.home), *user[6:]] if user[2] == "0" else user) for user in users]
        (self.folder / "passwd").write_text("\n".join(passwd) + "\n")
        environment = " ".join(f'"{key}={value}"' for key, value in self._lan.environment.items())
        settings = _SSHD.format(lan=lan, folder=self.folder, environment=environment)
        (self.folder / "sshd_config").write_text(settings)

    def _is_up(self) -> bool:
        assert self._boot is not None
        assert self._boot.poll() is None, (self.folder / "boot.log").read_text()
        if not (self.folder / "up").exists():
            return False
        self._init = psutil.Process(self._boot.pid).children()[0]
        return True

    def _connect(self) -> None:
        assert self._init is not None
        pid = str(self._init.pid)
        card = ["name", "eth0", "address", self._mac, "netns", pid]
        self._lan.ip("link", "add", self.port, "type", "veth", "peer", *card)
        self._lan.ip("link", "set", self.port, "master", BRIDGE, "up")
        for arguments in (
            ["address", "add", f"{self.address}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["link", "set", "lo", "up"],
            ["route", "add", "default", "dev", "eth0"],  # leads nowhere; tells programs which address is theirs
        ):
            self.run("ip", *arguments)


def _is(pid: int, name: str) -> bool:
    return psutil.Process(pid).name() == name


def _namespace(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return 0
