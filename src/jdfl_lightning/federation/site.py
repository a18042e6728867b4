"""A site: reports its clients, trains them, and evaluates models on its held-out images."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import platformdirs
import torch

from jdfl_lightning.backends.base import describe
from jdfl_lightning.backends.local import LocalRunner
from jdfl_lightning.client.evaluation import Counts, count
from jdfl_lightning.client.features import open_workspace, why_no_features
from jdfl_lightning.client.fit import Workspace, initial_backbone
from jdfl_lightning.config import parse_experiment
from jdfl_lightning.core.errors import InputError, PublicError, StorageError
from jdfl_lightning.core.files import checked
from jdfl_lightning.core.messages import DISCOVERY_ROUND, FitFailure, FitResult, FitTask
from jdfl_lightning.core.system import reuse_memory
from jdfl_lightning.data import ImageFolderDomains, SiteFolders
from jdfl_lightning.federation.wire import (
    Answer,
    Payload,
    RequestHeader,
    SiteInfo,
    read_request,
    shared_settings,
    write_answer,
)
from jdfl_lightning.server.resume import require_equal
from jdfl_lightning.storage.checkpoint import ClientStates

Option = bool | bytes | float | int | str
"""Type of the options that a site's operator sets."""


SERVER_ONLY = ("run_dir", "resume", "logger", "discovery", "backend", "callbacks")
"""Settings that a site does not use; their classes need not be installed there."""


def _number(options: Mapping[str, Option], name: str, default: int | None = None) -> int:
    value = options.get(name, default)
    if type(value) is not int or value < 0:
        got = value if type(value) is int else "none"
        raise PublicError(f"Expected the site's {name} to be a number from 0 but got {got}.")
    return value


def discreet(error: Exception) -> str:
    """Return the part of an error that may leave a site: the message of a `PublicError`, else only the error's type.

    >>> discreet(PublicError("Expected the site's data-root.")), discreet(OSError("no image jane.png"))
    ("Expected the site's data-root.", 'OSError, of which the log of the site has more')
    """
    return (
        str(error)
        if isinstance(error, PublicError)
        else f"{type(error).__name__}, of which the log of the site has more"
    )


class SiteWorker:
    """A site: its images, its module and its clients' states.

    Args:
        arguments: the settings of the run, as command-line arguments.
        options: the site's own options: ``partition-id``, its number from 0; ``data-root``, the folder of its images
            (`SiteFolders`) or of the data set; ``num-partitions``, the number of sites that share the clients of a data
            set that they all have; ``state-dir``, the folder of its clients' states.
    """

    def __init__(self, arguments: Sequence[str], options: Mapping[str, Option]) -> None:
        reuse_memory()
        self.experiment = parse_experiment("site", arguments, leave_out=SERVER_ONLY)
        self.number = _number(options, "partition-id")
        data, root = self.experiment.data, options.get("data-root")
        own = isinstance(data, SiteFolders)
        if isinstance(data, SiteFolders):
            if root is None:
                raise PublicError("Expected the site's data-root: the folder of its images.")
            data.stand_alone(self.number, str(root))
        elif isinstance(data, ImageFolderDomains) and root is not None:
            data.root = str(root)
        dealt = data.deal(self.experiment.seed_everything)
        self.fingerprint = data.fingerprint()
        clients = list(range(len(dealt.clients)))
        if not own:  # every site has all images and uses its share of them
            sites = _number(options, "num-partitions", 1)
            if self.number >= sites:
                raise PublicError(
                    f"Expected the site's partition-id to be below num-partitions, {sites}, but got {self.number}."
                )
            clients = clients[self.number :: sites]
            parts = (dealt.test, dealt.val, dealt.unseen)
            test, val, unseen = ([held[self.number :: sites] for held in part] for part in parts)
            data.partition = replace(dealt, test=test, val=val, unseen=unseen, whole_test=dealt.test)
        self.info = SiteInfo(
            site=self.number,
            own=own,
            clients=clients,
            sizes=[dealt.sizes[client] for client in clients],
            classes=list(data.class_names),
            domains=list(data.domain_names),
            held=[len(held) for held in data.partition.test],
            fingerprint=self.fingerprint,
            version=f"jdfl-lightning {version('jdfl-lightning')}, torch {torch.__version__}",
        )
        self._folder = Path(str(options.get("state-dir") or platformdirs.user_state_path("jdfl-lightning") / "sites"))
        self._workspace: Workspace | None = None

    def answer(self, payload: Payload, say: Callable[[str], None]) -> Payload:
        """Fit clients and evaluate models as requested; show progress to the site's operator."""
        header = checked(RequestHeader, payload.notes["header"])
        self._check(header)
        if self._workspace is None or self._workspace.first != header.first:
            sent_all = why_no_features(self.experiment) is not None
            pretrained = bool(self.experiment.private)  # nobody sends a client what is private, not even at the start
            backbone = initial_backbone(self.experiment, pretrained) if sent_all else None
            self._workspace = open_workspace(self.experiment, header.first, backbone)
        self._check_settings(header, self._workspace)
        request = read_request(payload)
        here = {header.first + client for client in self.info.clients} if self.info.own else {*self.info.clients}
        if strangers := {task.client for task in request.tasks} - here:
            raise PublicError(f"Expected tasks for the clients of site {self.number} but got some for {strangers}.")
        states = ClientStates(self._folder / header.run / f"site{self.number}")
        start = time.perf_counter()

        def tell(error: Exception) -> str:
            say(f"a fit failed: {describe(error)}")
            return discreet(error)

        runner = LocalRunner(self._workspace, states, tell)
        results = [self._fit(runner, states, task, tell) for task in request.tasks]
        if results:
            clients = ", ".join(str(result.client) for result in results)
            what = "evaluated the own models of" if request.tasks[0].personal else "trained"
            say(f"round {request.tasks[0].round}: {what} client {clients} in {time.perf_counter() - start:.1f} s")
        start = time.perf_counter()
        counts: dict[str, Counts] = {}
        try:
            counts = {
                name: count(self._workspace, weights, request.buffers) for name, weights in request.models.items()
            }
        except Exception as error:  # the fits are still valid
            say(f"evaluating failed: {describe(error)}")
        if counts:
            say(f"evaluated {len(counts)} model(s) in {time.perf_counter() - start:.1f} s")
        return write_answer(Answer(results, counts, time.perf_counter() - start))

    def _check(self, header: RequestHeader) -> None:
        """Raise a `PublicError` if a request is for another site or other images."""
        if not re.fullmatch(r"[0-9a-f]{32}", header.run):
            raise PublicError("Expected the server to name its run by 32 hexadecimal digits.")
        if (header.site, header.fingerprint) != (self.number, self.fingerprint):
            raise PublicError(
                f"Expected site {header.site} with the images that it had when the run began but this is site "
                f"{self.number}, or its images have changed."
            )

    def _check_settings(self, header: RequestHeader, workspace: Workspace) -> None:
        """Raise a `PublicError` if a request is for other settings, or for another frozen network."""
        ours = shared_settings(workspace.experiment)
        try:
            require_equal(
                json.loads(header.settings), ours, "the server's run", "a site has to have the same settings."
            )
        except InputError as error:  # names only settings of the app, not where the images are
            raise PublicError(str(error)) from error

    def _fit(
        self, runner: LocalRunner, states: ClientStates, task: FitTask, tell: Callable[[Exception], str]
    ) -> FitResult | FitFailure:
        options = self.experiment.checkpoint
        try:
            if task.round != DISCOVERY_ROUND:  # Phase 1 uses no states
                states.settle(task.client, task.since, task.round - 1 - options.every * options.keep)
            return next(iter(runner.fit([task])))
        except StorageError as error:  # affects this site only
            return FitFailure(task.client, tell(error))
