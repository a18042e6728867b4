"""A whole run on one page, in the order of the paper's Algorithm 1."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from jdfl_lightning.backends import Runner
from jdfl_lightning.checkpoint import Checkpoints, ClientStates
from jdfl_lightning.client import Site
from jdfl_lightning.config import Experiment, as_dict, save_config
from jdfl_lightning.discovery import PseudoDomains, cluster
from jdfl_lightning.display import Display
from jdfl_lightning.errors import InputError, StorageError
from jdfl_lightning.interrupts import after_current_client
from jdfl_lightning.joint import GradedTargets, HardTargets, RandomTargets
from jdfl_lightning.journal import RunJournal
from jdfl_lightning.loggers import log_picture, open_logger
from jdfl_lightning.messages import DISCOVERY, FitFailure, FitResult, FitTask
from jdfl_lightning.models import build_backbone, num_features, select_parameters
from jdfl_lightning.privacy import noise_key, spent_epsilon
from jdfl_lightning.report.run import draw_curves, draw_discovery
from jdfl_lightning.resume import Reached, find_run, fingerprint, read_reached
from jdfl_lightning.rounds import Journal, ServerState, judge, run_rounds
from jdfl_lightning.run_folder import (
    CONFIG,
    CURVES,
    DISCOVERY_FIGURE,
    METRICS,
    Run,
    forget_rounds,
    last_round,
    load_discovery,
    lock_run,
    make_run_folder,
    read_run,
    save_discovery,
)
from jdfl_lightning.trainer import check_trainer


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
    site = prepare(experiment, display)
    data = fingerprint(experiment.data)
    reached = None if earlier is None else read_reached(experiment, earlier, data)
    folder = make_run_folder(experiment.run_dir, experiment.name) if earlier is None else earlier
    logger, status = None, "failed"
    lock = lock_run(folder)
    try:
        save_config(experiment, folder / CONFIG)
        logger = open_logger(experiment.logger, folder, experiment.name, reached.about.logger if reached else None)
        display.say(f"run folder: {folder}" + (f", going on after round {reached.state.round}" if reached else ""))
        if logger is not None:
            logger.log_hyperparams(as_dict(experiment))
        if reached is not None:
            Checkpoints(folder, experiment.checkpoint.keep).clean(reached.state.round)
        best = forget_rounds(folder, reached.state.round if reached else 0)
        with after_current_client(display.say) as check:
            journal = RunJournal(experiment, folder, data, logger, display, best, check)
            try:
                _run(experiment, site, journal, reached)
            except (KeyboardInterrupt, InputError) as error:
                if not isinstance(error, StorageError):
                    journal.save()
                if isinstance(error, KeyboardInterrupt):
                    display.say(f"go on with: jdfl-lightning fit --resume {folder}")
                raise
        run = read_run(folder)
        draw_curves(run, folder / CURVES)
        log_picture(logger, "curves", folder / CURVES)
        status = "success"
        return run
    except InputError:
        begun = (folder / METRICS).exists() or Checkpoints(folder, 1).rounds()
        if earlier is None and not begun:  # not even one round: nothing is lost
            shutil.rmtree(folder, ignore_errors=True)
            if experiment.run_dir is None:
                with suppress(OSError):  # runs/, unless it holds other runs
                    folder.parent.rmdir()
        raise
    finally:
        lock.close()
        if logger is not None:
            logger.finalize(status)


def _run(experiment: Experiment, site: Site, journal: RunJournal, reached: Reached | None) -> None:
    """Phases 1 to 3; what an earlier run has reached is not done again."""
    folder, data = journal.folder, experiment.data
    states = ClientStates(folder / "clients")
    with experiment.backend.open(experiment, states) as runner:
        # Phase 1: brief local training everywhere, clustered into pseudo-domains
        num_domains, assignments, table = 1, [0] * data.num_clients, None
        if experiment.supervision != "base":
            found = load_discovery(folder, journal.data)
            if found is None:
                found = discover(experiment, site, runner, journal)
            true_domains = [data.domain_names[domain] for domain in data.partition.client_domains]
            record = save_discovery(folder, found, true_domains, journal.data)
            draw_discovery(record, folder / DISCOVERY_FIGURE)
            log_picture(journal.logger, "discovery", folder / DISCOVERY_FIGURE)
            num_domains, assignments = found.num_domains, found.assignments
            table = target_table(experiment, found)
            journal.display.say(f"pseudo-domains: M = {num_domains} ({found.criterion}), ARI {record['ari']:.2f}")
        # Phase 2: from theta_0 again, with a head of M x C outputs
        weights, buffers = site.initial(num_domains)
        state = ServerState(0, weights, buffers, experiment.algorithm.init_server(weights))
        # Phase 3: federated rounds
        if reached is not None:
            if set(weights) != set(reached.state.weights):
                raise StorageError("Expected a checkpoint of this network but its weights have other names.")
            state = replace(reached.state, weights={name: reached.state.weights[name] for name in weights})
            if last_round(folder) < state.round:  # it ended before its last round was judged
                judge(experiment, runner, state, reached.metrics, journal)
        key = 0 if experiment.privacy.clip_norm is None else noise_key(folder)
        run_rounds(experiment, runner, state, assignments, table, journal, key)


def prepare(experiment: Experiment, display: Display) -> Site:
    """Load the images and find out what can be wrong before a run folder is made: trainer, backbone, data, layers."""
    data = experiment.data
    data.progress = display.step
    check_trainer(experiment.trainer)
    num_features(build_backbone(experiment.backbone, data.size), data.size)
    data.deal(experiment.seed_everything)
    site = Site(experiment)
    weights, buffers = site.initial(num_domains=1)
    select_parameters(site.module(weights, buffers), experiment.clustering.layers)
    if experiment.privacy.clip_norm is not None:
        spent_epsilon(experiment.privacy, data.num_clients, experiment.clients_per_round, experiment.rounds)
        if any(tensor.is_floating_point() for tensor in buffers.values()):
            raise InputError(
                f"Expected --backbone to have no running statistics with --privacy but {experiment.backbone} does: "
                "they leave the clients without clipping or noise."
            )
    return site


def discover(experiment: Experiment, site: Site, runner: Runner, journal: Journal) -> PseudoDomains:
    """Phase 1: E_0 epochs from theta_0 at every client, then clustering of the normalised updates."""
    weights, buffers = site.initial(num_domains=1)
    seed, num_clients = experiment.seed_everything, experiment.data.num_clients
    vectors: list[Tensor] = []
    for result in runner.fit([FitTask(client, DISCOVERY, seed, weights, buffers) for client in range(num_clients)]):
        vectors.append(_update_of(result))
        journal.step("discovery", len(vectors), num_clients)
    options = experiment.clustering
    return cluster(torch.stack(vectors), experiment.num_domains, options.criterion, options.max_domains, seed)


def _update_of(result: FitResult | FitFailure) -> Tensor:
    """Return a client's update vector, or say why it has none."""
    if isinstance(result, FitFailure):
        raise InputError(f"Expected every client to take part in discovery but client {result.client}: {result.reason}")
    update = result.upload["update"]["u"]
    if not torch.isfinite(update).all():
        raise InputError(
            f"Expected a finite update but client {result.client}'s in discovery is not: lower --lr or set "
            "--trainer.gradient_clip_val."
        )
    return update


def target_table(experiment: Experiment, found: PseudoDomains) -> Tensor:
    """Phase 2: the weights over pseudo-domains (M, M) that the supervision asks for."""
    if experiment.supervision == "graded":
        return GradedTargets(found.centroids, experiment.alpha, experiment.tau).table
    if experiment.supervision == "random":
        return RandomTargets(found.num_domains, experiment.phi).table
    return HardTargets(found.num_domains).table
