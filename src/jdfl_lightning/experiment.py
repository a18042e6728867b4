"""A whole run on one page, in the order of the paper's Algorithm 1."""

from __future__ import annotations

import shutil
from contextlib import suppress

import torch
from torch import Tensor

from jdfl_lightning.backends import Runner
from jdfl_lightning.checkpoint import ClientStates
from jdfl_lightning.client import Site
from jdfl_lightning.config import Experiment, as_dict, save_config
from jdfl_lightning.discovery import PseudoDomains, cluster
from jdfl_lightning.display import Display
from jdfl_lightning.errors import InputError
from jdfl_lightning.joint import GradedTargets, HardTargets, RandomTargets
from jdfl_lightning.loggers import log_picture, open_logger
from jdfl_lightning.messages import DISCOVERY, FitTask
from jdfl_lightning.models import build_backbone, num_features, select_parameters
from jdfl_lightning.report import draw_curves, draw_discovery
from jdfl_lightning.rounds import ServerState, run_rounds
from jdfl_lightning.run_folder import (
    CONFIG,
    CURVES,
    DISCOVERY_FIGURE,
    METRICS,
    Run,
    SavedModel,
    append_metrics,
    make_run_folder,
    read_run,
    save_discovery,
)
from jdfl_lightning.trainer import check_trainer


def fit(experiment: Experiment, display: Display | None = None) -> Run:
    """Run Joint Domain-Class Federated Learning and leave a run folder.

    Args:
        experiment: the settings.
        display: where progress is shown; nothing is shown if not given.

    Returns:
        The finished run, read back from its folder.
    """
    display = display or Display()
    data = experiment.data
    site = prepare(experiment, display)
    folder = make_run_folder(experiment.run_dir, experiment.name)
    logger, status = None, "failed"
    try:
        save_config(experiment, folder / CONFIG)
        logger = open_logger(experiment.logger, folder, experiment.name)
        display.say(f"run folder: {folder}")
        if logger is not None:
            logger.log_hyperparams(as_dict(experiment))
        with experiment.backend.open(experiment, ClientStates(folder / "clients")) as runner:
            # Phase 1: brief local training everywhere, clustered into pseudo-domains
            num_domains, assignments, table = 1, [0] * data.num_clients, None
            if experiment.supervision != "base":
                found = discover(experiment, site, runner, display)
                true_domains = [data.domain_names[domain] for domain in data.partition.client_domains]
                record = save_discovery(folder, found, true_domains)
                draw_discovery(record, folder / DISCOVERY_FIGURE)
                log_picture(logger, "discovery", folder / DISCOVERY_FIGURE)
                num_domains, assignments = found.num_domains, found.assignments
                table = target_table(experiment, found)
                display.say(f"pseudo-domains: M = {num_domains} ({found.criterion}), ARI {record['ari']:.2f}")
            # Phase 2: from theta_0 again, with a head of M x C outputs
            weights, buffers = site.initial(num_domains)
            state = ServerState(0, weights, buffers, experiment.algorithm.init_server(weights))
            # Phase 3: federated rounds
            best = float("-inf")
            for report in run_rounds(experiment, runner, site, state, assignments, table, display.step):
                improved = report.scores.overall > best
                best = max(best, report.scores.overall)
                metrics = report.scores.as_metrics() | {"test/acc_best": best} | report.metrics
                number = report.state.round
                append_metrics(folder, {"round": number} | metrics)
                model = SavedModel(
                    report.state.weights, report.state.buffers, experiment.backbone, data.size, list(data.class_names)
                )
                if improved:
                    model.save(folder, "best")
                model.save(folder, "last")
                if logger is not None:
                    logger.log_metrics(metrics, step=number)
                display.round(number, experiment.rounds, metrics)
        run = read_run(folder)
        draw_curves(run, folder / CURVES)
        log_picture(logger, "curves", folder / CURVES)
        status = "success"
        return run
    except InputError:
        if not (folder / METRICS).exists():  # not even one round: nothing is lost
            shutil.rmtree(folder, ignore_errors=True)
            if experiment.run_dir is None:
                with suppress(OSError):  # runs/, unless it holds other runs
                    folder.parent.rmdir()
        raise
    finally:
        if logger is not None:
            logger.finalize(status)


def prepare(experiment: Experiment, display: Display) -> Site:
    """Load the images and find out what can be wrong before a run folder is made: trainer, backbone, data, layers."""
    data = experiment.data
    data.progress = display.step
    check_trainer(experiment.trainer)
    num_features(build_backbone(experiment.backbone, data.size), data.size)
    data.deal(experiment.seed_everything)
    site = Site(experiment)
    select_parameters(site.module(*site.initial(num_domains=1)), experiment.clustering.layers)
    return site


def discover(experiment: Experiment, site: Site, runner: Runner, display: Display) -> PseudoDomains:
    """Phase 1: E_0 epochs from theta_0 at every client, then clustering of the normalised updates."""
    weights, buffers = site.initial(num_domains=1)
    seed, num_clients = experiment.seed_everything, experiment.data.num_clients
    vectors: list[Tensor] = []
    for result in runner([FitTask(client, DISCOVERY, seed, weights, buffers) for client in range(num_clients)]):
        vectors.append(result.upload["update"]["u"])
        display.step("discovery", len(vectors), num_clients)
    options = experiment.clustering
    return cluster(torch.stack(vectors), experiment.num_domains, options.criterion, options.max_domains, seed)


def target_table(experiment: Experiment, found: PseudoDomains) -> Tensor:
    """Phase 2: the weights over pseudo-domains (M, M) that the supervision asks for."""
    if experiment.supervision == "graded":
        return GradedTargets(found.centroids, experiment.alpha, experiment.tau).table
    if experiment.supervision == "random":
        return RandomTargets(found.num_domains, experiment.phi).table
    return HardTargets(found.num_domains).table
