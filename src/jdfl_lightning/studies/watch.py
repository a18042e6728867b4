"""A page of a run's curves and discovery, served to this machine alone while the run trains."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

from jdfl_lightning.core.errors import InputError, plain, require
from jdfl_lightning.core.files import as_json
from jdfl_lightning.report.listing import summarize
from jdfl_lightning.storage.discoveries import read_discovery
from jdfl_lightning.storage.folder import require_own_files
from jdfl_lightning.storage.metrics import last_round, read_numbers
from jdfl_lightning.storage.names import DISCOVERY, DOMAIN_PREFIX, UNSEEN_PREFIX
from jdfl_lightning.storage.trust import CONFIG

ADDRESS = "127.0.0.1"
"""The only address that is listened at: nobody on another machine can connect."""
_SECONDS = 10
"""Time that a connection may take to send its request."""
_SUMMARY = ("state", "problem", "round", "rounds", "accuracy", "worst")
"""What the page shows of a run's summary."""
_FOUND = ("num_domains", "criterion", "note", "ari", "inertias", "silhouettes", "assignments", "projection")
"""What the page shows of a discovery, besides the true domains."""


def live_state(folder: Path) -> dict[str, Any]:
    """Return what a page shows of a run: its state, its curves and its discovery; `problem` says what is wrong.

    Args:
        folder: the run folder; a run may be writing it.
    """
    try:
        require_own_files(folder)
        if not (folder / CONFIG).is_file():
            raise InputError(f"Expected a run folder but {folder} has no {CONFIG}.")
        summary = summarize(folder)
        last_round(folder)  # raises an error if a row has no round
        rows = read_numbers(folder)
        found = read_discovery(folder) if (folder / DISCOVERY).exists() else None
    except (InputError, OSError) as error:
        return {"name": folder.name, "state": "damaged", "problem": plain(str(error))}
    names = (summary.data, summary.algorithm, summary.supervision)
    seconds = sum(row.get("time/fit", math.nan) + row.get("time/evaluate", math.nan) for row in rows)
    spent = seconds if rows and math.isfinite(seconds) else None
    left = None
    if summary.state == "running" and summary.rounds is not None and spent is not None:
        left = max(0.0, (summary.rounds - rows[-1]["round"]) * spent / len(rows))  # as long as the mean of those so far
    discovery = None
    if found is not None:
        discovery = {name: found.get(name) for name in _FOUND} | {"clients": len(found["assignments"])}
        discovery["true_domains"] = found.get("true_domains") or {}
    return {name: getattr(summary, name) for name in _SUMMARY} | {
        "name": folder.name,
        "title": ", ".join([*(str(name) for name in names if name is not None), f"seed {summary.seed}"]),
        "left": left,
        "spent": spent,
        "curves": _curves(rows),
        "loss": _points(rows, "train/loss"),
        "discovery": discovery,
    }


def _curves(rows: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return the accuracies over the rounds: overall, on validation images, of each domain and each unseen one."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    kinds = [("overall", "overall", "test/acc"), ("validation", "validation", "val/acc")]
    kinds += [("domain", n.removeprefix(DOMAIN_PREFIX), n) for n in columns if n.startswith(DOMAIN_PREFIX)]
    kinds += [
        ("unseen", f"{n.removeprefix(UNSEEN_PREFIX)} (unseen)", n) for n in columns if n.startswith(UNSEEN_PREFIX)
    ]
    return [{"kind": k, "name": name, "points": _points(rows, c)} for k, name, c in kinds if c in columns]


def _points(rows: Sequence[Mapping[str, float]], column: str) -> list[tuple[int, float]]:
    found = [(int(row["round"]), row.get(column, math.nan)) for row in rows]
    return [(round, value) for round, value in found if math.isfinite(value)]


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

    do_HEAD = do_GET  # noqa: N815 - the name is that of http.server; it sends the headers alone

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
        if (
            any(Path(folder).iterdir()) and not (Path(folder) / CONFIG).exists()
        ):  # an empty one may be that of a run soon
            raise InputError(f"Expected a run folder but {folder} has no {CONFIG}: give the folder of one run.")
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
