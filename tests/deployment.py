"""A real Flower deployment on loopback: a SuperLink with TLS and node authentication, and SuperNodes."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from helpers import until

PROGRAMS = Path(sys.executable).parent
LINK = "loopback"


def make_certificates(folder: Path) -> None:
    """Write a CA, and a server's certificate for this machine that it has signed."""
    now, day = datetime.datetime.now(datetime.timezone.utc), datetime.timedelta(days=1)
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def certificate(name: str, public: ec.EllipticCurvePublicKey, is_authority: bool) -> x509.CertificateBuilder:
        usage = x509.KeyUsage(True, False, False, False, False, is_authority, is_authority, False, False)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")]))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )

    root = certificate("authority", authority.public_key(), is_authority=True).sign(authority, hashes.SHA256())
    here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    leaf = (
        certificate("localhost", key.public_key(), is_authority=False)
        .add_extension(x509.SubjectAlternativeName(here), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(root.public_bytes(pem))
    (folder / "server.pem").write_bytes(leaf.public_bytes(pem))
    (folder / "server.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def make_node_key(file: Path) -> Path:
    """Write a SuperNode's key, and beside it the public one: ``ssh-keygen -t ecdsa -b 384``."""
    key = ec.generate_private_key(ec.SECP384R1())
    encoding, private = serialization.Encoding, serialization.PrivateFormat.OpenSSH
    file.write_bytes(key.private_bytes(encoding.PEM, private, serialization.NoEncryption()))
    public = key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    file.with_suffix(".pub").write_bytes(public)
    return file


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def descendants(pid: int) -> list[int]:
    """All processes that a process has started, and that these have."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        try:
            stat = (folder / "stat").read_text() if folder.name.isdigit() else ""
        except OSError:
            continue
        if stat:
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(folder.name))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started: nothing of it can say that it goes."""
    for pid in [process.pid, *descendants(process.pid)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


class Deployment:
    """A SuperLink and its SuperNodes; processes, keys and logs in one folder.

    Args:
        folder: where everything goes.
        environment: variables for all processes.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        folder.mkdir(parents=True)
        self.folder, self.environment = folder, environment
        self.port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        make_certificates(folder)

    def _variables(self, home: str) -> dict[str, str]:
        (self.folder / home).mkdir(exist_ok=True)
        return {
            **os.environ,
            "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(self.folder / home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            **self.environment,
        }

    def _flwr(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(PROGRAMS / "flwr"), *arguments],
            env=self._variables("cli"),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def _start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                [str(PROGRAMS / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._variables(name),
                cwd=self.folder,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def log(self, name: str) -> Path:
        """Return the file of what a process says."""
        return self.folder / f"{name}.log"

    def start_link(self) -> None:
        """Start the SuperLink and wait until it takes connections."""
        files = [f"--ssl-ca-certfile={self.folder / 'ca.crt'}", f"--ssl-certfile={self.folder / 'server.pem'}"]
        files.append(f"--ssl-keyfile={self.folder / 'server.key'}")
        link = self._start(
            "link", "flower-superlink", "--host=127.0.0.1", f"--port={self.port}", "--enable-supernode-auth", *files
        )
        trust = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))

        def up() -> bool:
            assert link.poll() is None, self.log("link").read_text()
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as plain:
                    trust.wrap_socket(plain, server_hostname="127.0.0.1").close()
                return True
            except OSError:
                return False

        until(up, 120, "the SuperLink")
        home = Path(self._variables("cli")["FLWR_HOME"])
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{LINK}"\n[superlink.{LINK}]\naddress = "127.0.0.1:{self.port}"\n'
            f"root-certificates = {json.dumps(str(self.folder / 'ca.crt'))}\n"
        )

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """Run Flower's command line; it answers in JSON, and ends with 0 even if it failed."""
        done = self._flwr(*arguments, "--format", "json")
        answer = json.loads(done.stdout)
        assert answer["success"], (done.stdout, done.stderr)
        return dict(answer)

    def start_node(
        self, name: str, key: Path, authority: Path | None = None, **options: int | str
    ) -> subprocess.Popen[bytes]:
        """Start a SuperNode, which trusts the SuperLink's authority unless another one is given."""
        config = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in options.items())
        return self._start(
            name,
            "flower-supernode",
            f"--superlink=127.0.0.1:{self.port}",
            f"--root-certificates={authority or self.folder / 'ca.crt'}",
            f"--auth-supernode-private-key={key}",
            f"--port={free_port()}",
            f"--node-config={config}",
        )

    def run(self, app: Path, **settings: int | str) -> str:
        """Submit an app; return the id of its run."""
        overrides = [f"--run-config={name}={json.dumps(value)}" for name, value in settings.items()]
        return str(self.flwr("run", str(app), LINK, *overrides)["run-id"])

    def status(self, run: str) -> dict[str, Any]:
        """Return what the SuperLink says of a run."""
        return dict(self.flwr("list", LINK, "--run-id", run)["runs"][0])

    def wait(self, run: str, seconds: float) -> dict[str, Any]:
        """Wait for the end of a run, until which Flower has more to show; show what it said if it did not end well."""
        said = self._flwr("log", run, LINK, "--stream", timeout=seconds).stdout
        found = self.status(run)
        assert found["status"] == "finished:completed", (found, said)
        return found

    def said(self, run: str) -> str:
        """Return what the server's app has said."""
        return self._flwr("log", run, LINK, "--show").stdout

    def close(self) -> None:
        """End everything."""
        for process in reversed(self.processes):
            kill(process)
