"""A whole run, in the order of the paper's Algorithm 1; and Phase 1 alone."""

from __future__ import annotations

import shutil
from pathlib import Path

from jdfl_lightning.clustering.clusters import PseudoDomains, cluster
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.errors import require
from jdfl_lightning.core.system import after_current_client
from jdfl_lightning.report.discovery import draw_discovery
from jdfl_lightning.server.events import Events
from jdfl_lightning.server.journal import RunJournal
from jdfl_lightning.server.phase1 import (
    collect_updates,
    initial_state,
    prepare,
    require_discovery,
)
from jdfl_lightning.server.rounds import Rounds
from jdfl_lightning.server.session import Session, open_run, open_session
from jdfl_lightning.storage.checkpoint import CLIENTS, ClientStates
from jdfl_lightning.storage.discoveries import load_discovery, read_discovery, save_discovery
from jdfl_lightning.storage.folder import SavedRun, read_run, save_figure
from jdfl_lightning.storage.names import ALONE, DISCOVERY_FIGURE
from jdfl_lightning.ui.display import Display
from jdfl_lightning.ui.loggers import log_picture


def fit(experiment: Experiment, display: Display | None = None) -> SavedRun:
    """Run Joint Domain-Class Federated Learning, or resume a run, and leave a run folder.

    Args:
        experiment: the settings.
        display: where progress is shown; nothing is shown if not given.

    Returns:
        The finished run, read back from its folder.
    """
    with open_session(experiment, display or Display()) as session:
        # Phase 1: clients train briefly from theta_0; their updates are clustered into M pseudo-domains
        domains = _find_domains(session) if experiment.needs_discovery else None
        session.events.discovered(domains)
        # Phase 2: from theta_0 again, with a head of M x C outputs, and the supervision's targets
        workspace, (begun, private) = session.workspace, initial_state(session.workspace, domains)
        # Phase 3: rounds; each samples clients, has them fit, screens their answers, aggregates and evaluates
        theta_0, frozen = workspace.start(1), workspace.frozen
        rounds = Rounds(experiment, session.runner, session.events, theta_0, frozen, private)
        session.finish(rounds.run(session.resumed(begun, rounds)))
    return read_run(session.journal.folder)


def discover(experiment: Experiment, display: Display | None = None) -> Path:
    """Run Phase 1 alone and leave a folder that ``fit --discovery`` reuses.

    Args:
        experiment: the settings; those of the rounds do not matter.
        display: where progress is shown; nothing is shown if not given.

    Returns:
        The folder, with ``discovery.json``, the clients' vectors and a figure.
    """
    display = display or Display()
    require(experiment.resume is None, "--resume", "left out, as a discovery is done at once,", experiment.resume)
    require(experiment.discovery is None, "--discovery", "left out, as it is to be made,", experiment.discovery)
    require_discovery(experiment)
    workspace = prepare(experiment, display)
    with open_run(experiment, f"{experiment.name}{ALONE}", None) as folder:
        display.say(f"folder: {folder}")
        try:
            with (
                after_current_client(display.say) as check,
                experiment.backend.open(workspace.experiment, ClientStates(folder / CLIENTS)) as runner,
            ):
                journal = RunJournal(experiment, folder, experiment.data.fingerprint(), None, display, check)
                _find_domains(Session(experiment, workspace, runner, journal, Events(journal)))
        except KeyboardInterrupt:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return folder


def _find_domains(session: Session) -> PseudoDomains:
    """Phase 1: return this run's own discovery, or cluster updates that are reused or collected now."""
    experiment, journal, events, updates = session.experiment, session.journal, session.events, session.updates
    folder, data, true_domains = journal.folder, journal.data, experiment.data.true_domains
    known = load_discovery(folder, data, experiment.data.num_clients)
    if known is None:
        if updates is None:
            events.clients_asked("discovery", experiment.discovery_clients)
            answered, unassigned = events.client_answered, events.client_unassigned
            updates = collect_updates(experiment, session.runner, session.workspace, answered, unassigned)
        options, seed = experiment.clustering, experiment.seed_everything
        found = cluster(updates, experiment.num_domains, options.criterion, options.max_domains, seed)
        save_discovery(folder, updates, found, true_domains, data)
    else:
        _, found = known
    record = read_discovery(folder)
    if experiment.figures:
        save_figure(draw_discovery(record), folder / DISCOVERY_FIGURE, experiment.figure_formats)
        log_picture(journal.logger, "discovery", folder / DISCOVERY_FIGURE)
    if journal.logger is not None and known is None:
        numbers = [name for name in ("num_domains", "ari", "nmi", "bytes_down", "bytes_up") if name in record]
        journal.logger.log_metrics({f"discovery/{name}": record[name] for name in numbers}, step=0)
    why = f": {found.note}" if found.note else ""
    truth = f", ARI {record['ari']:.2f}" if "ari" in record else ""
    journal.display.say(f"pseudo-domains: M = {found.num_domains} ({found.criterion}{why}){truth}")
    if found.num_domains == 1 and found.criterion != "given":
        journal.display.say(
            "No groups of clients were found, so that this is the plain head: give their number with --num_domains, or "
            "use more clients."
        )
    return found
