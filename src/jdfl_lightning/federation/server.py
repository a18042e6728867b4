"""The server of a federation: waits for the sites of a run, then trains with them."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from jdfl_lightning.backends import Backend, Runner
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.errors import InputError, reading, require
from jdfl_lightning.core.files import checked, read_json, write_whole
from jdfl_lightning.data.base import Roster
from jdfl_lightning.federation.members import Federation, Transport, capped, read_roster
from jdfl_lightning.federation.runner import SitesRunner
from jdfl_lightning.server.resume import find_run
from jdfl_lightning.server.run import fit
from jdfl_lightning.storage.checkpoint import ClientStates
from jdfl_lightning.storage.folder import SavedRun
from jdfl_lightning.storage.names import FEDERATION
from jdfl_lightning.ui.display import Display

_RunId = dict[Literal["run"], Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]]
"""Content of the file `FEDERATION`."""


@dataclass
class SitesBackend(Backend):
    """Clients at remote sites, which keep their images and their clients' states."""

    timeout: float = 1800.0
    """Seconds that a site has for an answer; a slower site is left out of the round."""
    poll: float = 0.5
    """Seconds between two polls for answers."""
    roster: str | None = None
    """YAML or JSON file of the sites that may take part, by number: key, clients, images. null: any site may."""
    max_weight: float = 10.0
    """Cap on a client's number of images, and on its share of the held-out ones, as a multiple of the median client's;
    for sites whose images the roster does not limit."""
    federation: Federation | None = field(default=None, init=False, repr=False, compare=False)

    states_here = False

    def __post_init__(self) -> None:
        require(self.timeout > 0, "--backend.timeout", "positive", self.timeout)
        require(self.poll > 0, "--backend.poll", "positive", self.poll)
        require(self.max_weight >= 1, "--backend.max_weight", "1 or more", self.max_weight)

    @contextmanager
    def open(self, experiment: Experiment, states: ClientStates) -> Iterator[Runner]:
        """Give the run an id for its sites; a resumed run keeps its id."""
        if self.federation is None:
            raise InputError("Expected SitesBackend to be used by the server of a federation: see docs/flower.md.")
        file = states.folder.parent / FEDERATION
        if not file.exists():
            write_whole(file, json.dumps({"run": secrets.token_hex(16)}).encode())
        with reading("the name of the run", file):
            run = checked(_RunId, read_json(file))["run"]
        yield SitesRunner(experiment, self.federation, run, self.max_weight)


def fit_federation(experiment: Experiment, transport: Transport, display: Display) -> SavedRun:
    """Wait for the sites of a run, then train with them: `fit` with images at remote sites.

    Args:
        experiment: the settings; its data's ``num_clients`` is the number of clients to wait for.
        transport: sends and receives payloads.
        display: where progress is shown.
    """
    for name, value in (("val_fraction", 0), ("unseen", None)):
        given = getattr(experiment.data, name)
        why = "in a federation, whose sites evaluate test images alone,"
        require(given == value, f"--data.{name}", f"{'null' if value is None else value} {why}", given)
    find_run(experiment)  # reports wrong settings before waiting for sites
    backend = experiment.backend if isinstance(experiment.backend, SitesBackend) else SitesBackend()
    roster = None if backend.roster is None else read_roster(backend.roster)
    backend.federation = Federation(transport, backend.timeout, backend.poll, display.say, roster)
    data, sites = experiment.data, backend.federation.gather(experiment.data.num_clients)
    limited = backend.federation.limited
    by_client = [
        (client, size, info.site) for info in sites for client, size in zip(info.clients, info.sizes, strict=True)
    ]
    if not sites[0].own:
        by_client.sort()
    told, listed = [size for _, size, _ in by_client], [site in limited for _, _, site in by_client]
    sizes = capped(told, [1] * len(told), listed, backend.max_weight)
    for client, (size, counts) in enumerate(zip(told, sizes, strict=True)):
        if counts < size:
            display.say(
                f"client {client} of site {by_client[client][2]} says it has {size} images and counts for {counts}, "
                f"{backend.max_weight:g} times the median: if it is right, list its site's images in --backend.roster"
            )
    digest = hashlib.blake2b(digest_size=16)
    for info in sites:  # a resumed run must find the same sites with the same sizes
        digest.update(f"{info.site} {info.fingerprint} {info.sizes} {info.held}\n".encode())
    data.class_names = tuple(sites[0].classes)
    data.domain_names = tuple(dict.fromkeys(name for info in sites for name in info.domains))
    data.roster = Roster(sizes, digest.hexdigest())
    return fit(replace(experiment, backend=backend), display)
