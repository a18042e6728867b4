"""A page of a run's curves and discovery, served to this machine alone while the run trains."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

from jdfl_lightning.core.errors import InputError, require
from jdfl_lightning.core.output import as_json
from jdfl_lightning.report.live import live_state

ADDRESS = "127.0.0.1"
"""The only address that is listened at: nobody on another machine can connect."""
_SECONDS = 10
"""Time that a connection may take to send its request."""


@cache
def _page() -> tuple[bytes, str]:
    """Return the page, and a policy under which a browser runs its own script and style and loads nothing else."""
    text = files("jdfl_lightning.report").joinpath("templates", "watch.html").read_text(encoding="utf-8")
    sources = []
    for tag in ("script", "style"):
        [content] = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        sources.append(f"{tag}-src 'sha256-{digest}'")
    rest = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return text.encode(), f"default-src 'none'; {'; '.join(sources)}; {rest}"


class _Handler(BaseHTTPRequestHandler):
    """Answers GET of the page and of the run's numbers, and nothing else; no path of a request names a file."""

    folder: ClassVar[Path]
    timeout = _SECONDS
    server_version, sys_version = "jdfl-lightning", ""

    def do_GET(self) -> None:
        """Send the page or the run's numbers."""
        _, port = self.connection.getsockname()
        if self.headers.get_all("Host") not in ([f"{ADDRESS}:{port}"], [f"localhost:{port}"]):
            self._send(HTTPStatus.MISDIRECTED_REQUEST, b"unknown host\n", "text/plain")  # a page of elsewhere asks
        elif self.path == "/":
            self._send(HTTPStatus.OK, _page()[0], "text/html")
        elif self.path == "/run.json":
            self._send(HTTPStatus.OK, as_json(live_state(self.folder)).encode(), "application/json")
        else:
            self._send(HTTPStatus.NOT_FOUND, b"not found\n", "text/plain")

    def do_HEAD(self) -> None:
        """Send the headers of GET."""
        self.do_GET()

    def parse_request(self) -> bool:
        """Refuse all other methods."""
        if not super().parse_request():
            return False
        if self.command not in ("GET", "HEAD"):
            self.close_connection = True  # its body is not read
            self._send(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET\n", "text/plain", {"Allow": "GET, HEAD"})
            return False
        return True

    def _send(self, status: HTTPStatus, body: bytes, kind: str, further: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": _page()[1],
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        for name, value in (headers | (further or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class WatchServer(ThreadingHTTPServer):
    """Serves the page of one run.

    Args:
        folder: the run folder.
        port: the port; 0 for any that is free.
    """

    daemon_threads = True

    def __init__(self, folder: str | Path, port: int = 0) -> None:
        require(0 <= port < 1 << 16, "--port", "between 0 and 65535", port)
        if not Path(folder).is_dir():
            raise InputError(f"Expected a run folder but there is no folder {folder}.")
        handler = type("_FolderHandler", (_Handler,), {"folder": Path(folder)})
        try:
            super().__init__((ADDRESS, port), handler)
        except OSError as error:
            raise InputError(f"Expected --port to be free but got {port}: {error.strerror}.") from error

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a connection that a browser has closed."""
