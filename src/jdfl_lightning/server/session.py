"""An open run: its locked folder, logger, journal and backend, and the checkpoint it is resumed from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jdfl_lightning.backends import Runner
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.clustering.updates import Updates
from jdfl_lightning.config import Experiment, as_dict, save_config
from jdfl_lightning.core.errors import InputError, Interrupted, StorageError
from jdfl_lightning.core.files import remove_asides, write_whole
from jdfl_lightning.core.messages import SUPERVISION, UNKNOWN
from jdfl_lightning.core.system import after_current_client
from jdfl_lightning.core.tensors import misfit
from jdfl_lightning.data.base import option_defaults
from jdfl_lightning.data.summary import data_table
from jdfl_lightning.report.details import draw_targets
from jdfl_lightning.report.protocol import Protocol
from jdfl_lightning.report.run import draw_curves
from jdfl_lightning.server.closing import close_run
from jdfl_lightning.server.events import Events
from jdfl_lightning.server.journal import RunJournal
from jdfl_lightning.server.phase1 import prepare
from jdfl_lightning.server.resume import Reached, drop_later_rounds, find_run, read_reached, reuse_discovery
from jdfl_lightning.server.rounds import Rounds
from jdfl_lightning.server.state import ServerState
from jdfl_lightning.storage.checkpoint import CLIENTS, Checkpoints, ClientStates, read_learned
from jdfl_lightning.storage.discoveries import save_joined
from jdfl_lightning.storage.folder import lock_run, make_run_folder, read_run, require_own_files, save_figure
from jdfl_lightning.storage.metrics import last_round, read_numbers
from jdfl_lightning.storage.names import CURVES, DATA, DIAGNOSIS, DISCOVERY, METRICS, STOPPED, TARGETS_FIGURE
from jdfl_lightning.storage.trust import CONFIG, own_settings
from jdfl_lightning.storage.weights import save_network
from jdfl_lightning.ui.display import Display
from jdfl_lightning.ui.loggers import WandbRounds, log_picture, open_logger


@dataclass(frozen=True)
class Session:
    """Everything a run uses while it is open."""

    experiment: Experiment
    workspace: Workspace
    """Has the shared initialisation, theta_0."""
    runner: Runner
    journal: RunJournal
    events: Events
    updates: Updates | None = None
    """The clients' updates of a reused discovery."""
    reached: Reached | None = None
    """The checkpoint, if the run is resumed."""

    def resumed(self, start: ServerState, rounds: Rounds) -> ServerState:
        """Return the state to start from: the checkpoint's, whose round is evaluated if it was not, or the start.

        Callbacks are told of all rounds that are over.

        Args:
            start: the state before the first round.
            rounds: those that follow.
        """
        if self.reached is None:
            return start
        state = _reached_state(self.reached, start, self.experiment.data.num_clients)
        self.events.repeat(read_numbers(self.journal.folder))
        if last_round(self.journal.folder) < state.round:
            rounds.evaluate(state, self.reached.header.metrics, self.reached.evaluated)
        return state

    def finish(self, state: ServerState) -> None:
        """Save what is known only at the end: a stopped run's checkpoint, newcomers' pseudo-domains, details."""
        if self.events.stop is not None:
            self.journal.stop(state)
        if state.domains is not None and state.domains.joined:
            save_joined(self.journal.folder, state.domains, self.experiment.data.true_domains)
        close_run(self, state)


@contextmanager
def open_session(experiment: Experiment, display: Display) -> Iterator[Session]:
    """Open a new or a resumed run; if it ends early, the last aggregated round is saved.

    Args:
        experiment: the settings.
        display: where progress is shown.
    """
    earlier = find_run(experiment)
    workspace = prepare(experiment, display)
    data = experiment.data.fingerprint()
    reached = None if earlier is None else read_reached(experiment, earlier, data)
    known = earlier is not None and (earlier / DISCOVERY).exists()
    updates = None if known else reuse_discovery(experiment, data)  # a resumed run has its own copy
    own = earlier is not None and bool(own_settings(earlier))  # else the checkpoint could name someone else's W&B run
    logged = reached.header.logger if reached is not None and own else None
    logger, status = None, "failed"
    with open_run(experiment, experiment.name, earlier) as folder:
        try:
            logger = open_logger(experiment.logger, folder, experiment.name, logged)
            where = f", resumed after round {reached.state.round}" if reached else ""
            display.say(f"run folder: {folder}{where}")
            scheduled = experiment.algorithm.has_schedule or experiment.supervision.has_schedule
            if reached and reached.state.round >= experiment.rounds and not scheduled:
                display.say(f"all {experiment.rounds} rounds are over: --rounds N with a larger number adds some")
            if isinstance(logger, WandbRounds) and logger.address:
                display.say(f"Weights & Biases: {logger.address}")
            about, protocol = _describe(experiment, folder)
            if logger is not None:
                logger.log_hyperparams(as_dict(experiment))
            drop_later_rounds(folder, reached.state.round if reached else 0, experiment.selection)
            states = ClientStates(folder / CLIENTS, experiment.checkpoint.reset_damaged_clients, durable=False)
            with after_current_client(display.say) as check:
                network = save_network(folder, workspace.network, experiment.backbone)
                complete = workspace.complete
                journal = RunJournal(experiment, folder, data, logger, display, check, network, complete, states)
                events = Events(journal, experiment.callbacks, experiment.selection, display.say)
                if reached is not None:
                    journal.resume(reached.state)
                try:
                    events.run_started(folder, experiment)
                    with experiment.backend.open(workspace.experiment, states) as runner:
                        display.table(data_table(about))  # not before the backend has accepted its options
                        display.say(f"protocol: {protocol.name}; accuracy is reported {protocol.picked}")
                        yield Session(experiment, workspace, runner, journal, events, updates, reached)
                except (KeyboardInterrupt, InputError) as error:
                    if not isinstance(error, StorageError):
                        journal.save()
                    with suppress(InputError):  # an error of a callback, which is shown, does not hide this one
                        events.run_ended(" ".join(str(error).split()) or type(error).__name__)
                    if isinstance(error, KeyboardInterrupt):
                        raise Interrupted(f"jdfl-lightning fit --resume {folder}") from None
                    raise
            if experiment.figures:
                drawings = {TARGETS_FIGURE: draw_targets(read_learned(folder, SUPERVISION), read_run(folder).rows)}
                for name, drawing in (drawings | {CURVES: draw_curves(read_run(folder))}).items():
                    if drawing is not None:
                        save_figure(drawing, folder / name, experiment.figure_formats)
                        log_picture(logger, Path(name).stem, folder / name)
            if events.stop is not None:
                # last: whoever finds it knows that the run is finished
                write_whole(folder / STOPPED, json.dumps(asdict(events.stop)).encode())
                display.say(f"stopped after round {events.stop.round} of {experiment.rounds}: {events.stop}")
            status = "success"
            events.run_ended(None if events.stop is None else str(events.stop))
        finally:
            if logger is not None:
                logger.finalize(status)


def _describe(experiment: Experiment, folder: Path) -> tuple[dict[str, Any], Protocol]:
    """Write and return what the run's images are and which protocol it follows."""
    about, data = experiment.data.describe(), experiment.data
    protocol = Protocol.of({name: getattr(data, name) for name in option_defaults()}, experiment.selection)
    about["protocol"] |= {"name": protocol.name, "select": protocol.select}
    write_whole(folder / DATA, json.dumps(about, indent=1).encode())
    return about, protocol


@contextmanager
def open_run(experiment: Experiment, name: str, earlier: Path | None) -> Iterator[Path]:
    """Make the folder of a run, or open that of a resumed one, and lock it; a new folder without results is removed.

    Args:
        experiment: the settings, which are saved in it.
        name: name of a new folder in ``runs``.
        earlier: the folder of the run that is resumed.
    """
    folder = make_run_folder(experiment.run_dir, name) if earlier is None else earlier
    require_own_files(folder)
    with lock_run(folder):
        try:
            remove_asides(folder)
            (folder / STOPPED).unlink(missing_ok=True)  # a run that is open is not finished
            save_config(experiment, folder / CONFIG)
            yield folder
        except InputError:
            if earlier is None and not _has_begun(folder):  # nothing is lost
                shutil.rmtree(folder, ignore_errors=True)
                if experiment.run_dir is None:
                    with suppress(OSError):  # runs/, unless it holds other runs
                        folder.parent.rmdir()
            raise


def _has_begun(folder: Path) -> bool:
    """Return whether the folder holds any result: Phase 1, a round, or a case of a sweep."""
    sweep = folder / DIAGNOSIS
    cases = sweep.is_file() and sweep.read_text().count("\n") > 1  # its first line is the header
    return (
        cases or any((folder / name).exists() for name in (METRICS, DISCOVERY)) or bool(Checkpoints(folder, 1).rounds())
    )


def _reached_state(reached: Reached, start: ServerState, num_clients: int) -> ServerState:
    """Return the checkpoint's state, after checking that it fits this network, algorithm and discovery."""
    found = reached.state.as_record()
    for group, tensors in start.as_record().items():
        if problem := misfit(found.get(group, {}), tensors):
            raise StorageError(f"Expected a checkpoint of this network and algorithm but {problem}.")
    weights = {name: reached.state.weights[name] for name in start.weights}
    domains = start.domains
    if domains is not None:
        for client, domain in reached.header.joined.items():
            if not (0 <= client < num_clients and UNKNOWN <= domain < domains.num_domains):
                known = f"{num_clients} clients in {domains.num_domains} pseudo-domains"
                raise StorageError(f"Expected a checkpoint of {known} but it has client {client} in {domain}.")
        moved = reached.centroids is not None
        centroids = domains.centroids if reached.centroids is None else reached.centroids
        like = domains.centroids
        if (centroids.shape, centroids.dtype) != (like.shape, like.dtype) or not centroids.isfinite().all():
            raise StorageError("Expected a checkpoint of these pseudo-domains but it has other centroids.")
        domains = replace(domains, joined=reached.header.joined, centroids=centroids, moved=moved)
    return replace(reached.state, weights=weights, domains=domains)
