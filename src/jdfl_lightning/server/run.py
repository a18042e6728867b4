"""A whole run on one page, in the order of the paper's Algorithm 1."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from jdfl_lightning.backends import Runner
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.client.trainer import check_trainer
from jdfl_lightning.clustering.clusters import PseudoDomains
from jdfl_lightning.clustering.updates import Updates
from jdfl_lightning.config import Experiment, as_dict, save_config
from jdfl_lightning.core.errors import InputError, Interrupted, Note, StorageError, require
from jdfl_lightning.core.files import remove_asides
from jdfl_lightning.core.messages import UNKNOWN
from jdfl_lightning.core.tensors import misfit
from jdfl_lightning.models import build_backbone, num_features
from jdfl_lightning.report.discovery import draw_discovery
from jdfl_lightning.report.run import draw_curves
from jdfl_lightning.server.journal import RunJournal
from jdfl_lightning.server.phase1 import collect_updates, find_domains
from jdfl_lightning.server.resume import Reached, best_so_far, find_run, read_reached, reuse_discovery
from jdfl_lightning.server.rounds import ServerState, evaluate_round, run_rounds
from jdfl_lightning.storage.checkpoint import CLIENTS, Checkpoints, ClientStates
from jdfl_lightning.storage.folder import (
    ALONE,
    CURVES,
    DIAGNOSIS,
    DISCOVERY,
    DISCOVERY_FIGURE,
    METRICS,
    Run,
    last_round,
    load_discovery,
    lock_run,
    make_run_folder,
    read_discovery,
    read_run,
    require_own_files,
    save_discovery,
    save_figure,
    save_joined,
)
from jdfl_lightning.storage.trust import CONFIG, own_settings
from jdfl_lightning.ui.display import Display
from jdfl_lightning.ui.interrupts import after_current_client
from jdfl_lightning.ui.loggers import log_picture, open_logger


def fit(experiment: Experiment, display: Display | None = None) -> Run:
    """Run Joint Domain-Class Federated Learning, or go on with a run, and leave a run folder.

    Args:
        experiment: the settings.
        display: where progress is shown; nothing is shown if not given.

    Returns:
        The finished run, read back from its folder.
    """
    display = display or Display()
    earlier = find_run(experiment)
    workspace = prepare(experiment, display)
    data = experiment.data.fingerprint()
    reached = None if earlier is None else read_reached(experiment, earlier, data)
    known = earlier is not None and (earlier / DISCOVERY).exists()
    updates = None if known else reuse_discovery(experiment, data)  # else it may have gone since
    own = earlier is not None and bool(own_settings(earlier))  # else its checkpoint could name anybody's W&B run
    logged = reached.header.logger if reached is not None and own else None
    logger, status = None, "failed"
    with open_run(experiment, experiment.name, earlier) as folder:
        try:
            logger = open_logger(experiment.logger, folder, experiment.name, logged)
            display.say(f"run folder: {folder}" + (f", going on after round {reached.state.round}" if reached else ""))
            if logger is not None:
                logger.log_hyperparams(as_dict(experiment))
            best = best_so_far(folder, reached.state.round if reached else 0, experiment.algorithm.keeps_best)
            with after_current_client(display.say) as check:
                journal = RunJournal(experiment, folder, data, logger, display, best, check)
                if reached is not None:
                    journal.resume(reached.state)
                try:
                    _run(experiment, workspace, journal, reached, updates)
                except (KeyboardInterrupt, InputError) as error:
                    if not isinstance(error, StorageError):
                        journal.save()
                    if isinstance(error, KeyboardInterrupt):
                        raise Interrupted(f"jdfl-lightning fit --resume {folder}") from None
                    raise
            run = read_run(folder)
            save_figure(draw_curves(run), folder / CURVES)
            log_picture(logger, "curves", folder / CURVES)
            status = "success"
            return run
        finally:
            if logger is not None:
                logger.finalize(status)


@contextmanager
def open_run(experiment: Experiment, name: str, earlier: Path | None) -> Iterator[Path]:
    """Make the folder of a run, or take that of an earlier one, and lock it; one in which nothing was done goes again.

    Args:
        experiment: the settings, which are saved in it.
        name: of a new folder in ``runs``.
        earlier: the folder of the run that is continued.
    """
    folder = make_run_folder(experiment.run_dir, name) if earlier is None else earlier
    require_own_files(folder)
    lock = lock_run(folder)
    try:
        remove_asides(folder)
        save_config(experiment, folder / CONFIG)
        yield folder
    except InputError:
        if earlier is None and not _has_begun(folder):  # nothing is lost
            shutil.rmtree(folder, ignore_errors=True)
            if experiment.run_dir is None:
                with suppress(OSError):  # runs/, unless it holds other runs
                    folder.parent.rmdir()
        raise
    finally:
        lock.close()


def _has_begun(folder: Path) -> bool:
    """Return whether anything was finished that would have to be done again: Phase 1, a round, a case of a sweep."""
    sweep = folder / DIAGNOSIS
    cases = sweep.is_file() and sweep.read_text().count("\n") > 1  # it has a head from the beginning
    return (
        cases or any((folder / name).exists() for name in (METRICS, DISCOVERY)) or bool(Checkpoints(folder, 1).rounds())
    )


def discover(experiment: Experiment, display: Display | None = None) -> Path:
    """Run Phase 1 alone and leave a folder that ``fit --discovery`` takes up.

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
                experiment.backend.open(experiment, ClientStates(folder / CLIENTS)) as runner,
            ):
                journal = RunJournal(experiment, folder, experiment.data.fingerprint(), None, display, 0.0, check)
                _find(experiment, workspace, runner, journal, None)
        except KeyboardInterrupt:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return folder


def require_discovery(experiment: Experiment) -> None:
    """Refuse Phase 1 with an algorithm for which nobody may look at a client's update."""
    allowed, name = experiment.algorithm.allows_discovery, type(experiment.algorithm).__name__
    require(allowed, "--algorithm", "another one, as discovery looks at every client's update,", name)


def _find(
    experiment: Experiment, workspace: Workspace, runner: Runner, journal: RunJournal, updates: Updates | None
) -> PseudoDomains:
    """Phase 1: what this run has found before, or what is to be found in updates, given or still to be asked for."""
    folder, data, true_domains = journal.folder, journal.data, experiment.data.true_domains
    known = load_discovery(folder, data, experiment.data.num_clients)
    if known is None:
        if updates is None:
            updates = collect_updates(experiment, runner, workspace, journal.step, journal.unassigned)
        found = find_domains(experiment, updates)
        save_discovery(folder, updates, found, true_domains, data)
    else:
        _, found = known
    record = read_discovery(folder)
    journal.discovered()
    save_figure(draw_discovery(record), folder / DISCOVERY_FIGURE)
    log_picture(journal.logger, "discovery", folder / DISCOVERY_FIGURE)
    if journal.logger is not None and known is None:
        numbers = [name for name in ("num_domains", "ari", "nmi", "bytes_down", "bytes_up") if name in record]
        journal.logger.log_metrics({f"discovery/{name}": record[name] for name in numbers}, step=0)
    why = f" as {found.note}" if found.note else ""
    truth = f", ARI {record['ari']:.2f}" if "ari" in record else ""
    journal.display.say(f"pseudo-domains: M = {found.num_domains} ({found.criterion}{why}){truth}")
    return found


def _run(
    experiment: Experiment, workspace: Workspace, journal: RunJournal, reached: Reached | None, updates: Updates | None
) -> None:
    """Phases 1 to 3; what an earlier run has reached is not done again."""
    folder = journal.folder
    states = ClientStates(folder / CLIENTS, experiment.checkpoint.reset_damaged_clients)
    with experiment.backend.open(experiment, states) as runner:
        # Phase 1: brief local training everywhere, clustered into pseudo-domains
        domains = None
        if experiment.supervision != "base":
            domains = _find(experiment, workspace, runner, journal, updates)
        # Phase 2: from theta_0 again, with a head of M x C outputs
        weights, buffers = workspace.initial(1 if domains is None else domains.num_domains)
        state = ServerState(0, weights, buffers, experiment.algorithm.init_server(weights), domains=domains)
        # Phase 3: federated rounds
        if reached is not None:
            state = _reached_state(reached, state, experiment.data.num_clients)
            if last_round(folder) < state.round:  # it ended before its last round was evaluated
                evaluate_round(experiment, runner, state, reached.metrics, journal, reached.evaluated)
        state = run_rounds(experiment, runner, state, journal, workspace.initial(1), workspace.frozen)
    if state.domains is not None and state.domains.joined:
        save_joined(folder, state.domains, experiment.data.true_domains)


def _reached_state(reached: Reached, start: ServerState, num_clients: int) -> ServerState:
    """Return the state that an earlier run has reached, in the form that this one would have."""
    problem = (
        misfit(reached.state.weights, start.weights)
        or misfit(reached.state.buffers, start.buffers)
        or next(filter(None, (misfit(reached.state.record.get(g, {}), like) for g, like in start.record.items())), None)
    )
    if problem:
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


def prepare(experiment: Experiment, display: Display) -> Workspace:
    """Load the images and find out what can be wrong before a run folder is made: trainer, backbone, data, layers."""
    data = experiment.data
    data.progress = display.step
    check_trainer(experiment.trainer)
    num_features(build_backbone(experiment.backbone, data.size), data.size)
    if data.roster is None:
        data.deal(experiment.seed_everything)
        for domain, classes in data.untested().items():
            warnings.warn(
                f"The test images of {domain} have none of {', '.join(classes)}: too few images for "
                f"--data.test_fraction {data.test_fraction:g}. Its accuracy says nothing about them.",
                Note,
                stacklevel=2,
            )
    workspace = Workspace(experiment)
    length, short = workspace.update_length(), experiment.clustering.sketch_dim
    fits = short is None or short <= length
    require(fits, "--clustering.sketch_dim", f"at most the {length} entries of --clustering.layers", short)
    experiment.algorithm.check_run(experiment, workspace.initial(num_domains=1)[1])
    return workspace
