"""The end of a run: its weights are examined in detail, clients evaluate their own, and each client gets a row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdfl_lightning.client.details import examine
from jdfl_lightning.client.evaluation import COUNTS, GLOBAL, IMAGES, MODELS, SEEN
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.files import write_csv
from jdfl_lightning.core.messages import FitFailure, FitResult, FitTask, RoundContext
from jdfl_lightning.report.details import draw_confusion
from jdfl_lightning.server.state import ServerState, make_tasks, sharing
from jdfl_lightning.storage.details import save_details
from jdfl_lightning.storage.folder import save_figure
from jdfl_lightning.storage.names import CLIENT_ROWS, CONFUSION_FIGURE, Which
from jdfl_lightning.storage.weights import SavedModel, kept_weights, load_model
from jdfl_lightning.ui.loggers import log_picture, log_rows

if TYPE_CHECKING:
    from jdfl_lightning.server.session import Session

Accuracies = dict[str, float]
"""Model, with a suffix for the images -> its accuracy at a client."""


def close_run(session: Session, state: ServerState) -> None:
    """Examine the weights that a run keeps and clients' own models after its last round; write, log and show it.

    Images at remote sites cannot be examined: only what the server knows of its clients is written.
    """
    workspace, folder, logger = session.workspace, session.journal.folder, session.journal.logger
    details: dict[str, Any] | None = None
    personal = evaluate_clients(session, state) if session.experiment.has_personal else None
    own = {} if personal is None else {"personal": summarise(workspace.experiment, state.round, personal)}
    if workspace.data.roster is None:
        which, model = _kept(folder)
        details = examine_model(workspace, which, model) | own
        write_details(workspace, folder, details)
        if workspace.experiment.figures:
            log_picture(logger, "confusion", folder / CONFUSION_FIGURE)
    elif own:
        save_details(folder, own, [])
    if logger is not None and (details or own):
        logger.log_metrics(_numbers(details or own), step=state.round)
    rows = client_rows(workspace.experiment, state, details, personal)
    write_csv(folder / CLIENT_ROWS, rows)
    log_rows(logger, "final/clients", rows, state.round)  # `clients` is a number of every round
    if own:
        session.journal.display.say(personal_line(own["personal"]["models"]))


def personal_line(models: dict[str, dict[str, Any]]) -> str:
    """Return the accuracies of clients' own models in one line.

    >>> personal_line({"personal": {"clients": 2, "mean": 0.5, "worst": 0.25, "std": None}})
    'over 2 clients, mean (worst) accuracy: personal 50.0 (25.0) %'
    """
    if not models:
        return "no client has evaluated a model of its own"
    each = [f"{name} {100 * found['mean']:.1f} ({100 * found['worst']:.1f}) %" for name, found in models.items()]
    clients = max(found["clients"] for found in models.values())
    return f"over {clients} clients, mean (worst) accuracy: {', '.join(each)}"


def _kept(folder: Path) -> tuple[Which, SavedModel]:
    """Return the weights that a run keeps: the best ones, or the last if these are missing or damaged."""
    if kept_weights(folder) == "best":
        try:
            return "best", load_model(folder, "best", network=False)
        except InputError:
            pass
    return "last", load_model(folder, "last", network=False)


def examine_model(workspace: Workspace, which: Which, model: SavedModel) -> dict[str, Any]:
    """Return the details of a saved model: which it is, and its results on test images and unseen domains."""
    about = {"weights": which, "round": model.header.round, "score": workspace.experiment.global_score}
    return about | examine(workspace, model.weights, model.buffers)


def write_details(workspace: Workspace, folder: Path, details: dict[str, Any]) -> None:
    """Write the details of a model and the figure of its confusion matrices."""
    names = list(workspace.data.class_names)
    save_details(folder, details, names)
    matrices: dict[str, list[list[int]]] = {
        part: details[part]["confusion"] for part in ("test", "unseen") if part in details
    }
    if workspace.experiment.figures:
        formats = workspace.experiment.figure_formats
        save_figure(draw_confusion(matrices, names), folder / CONFUSION_FIGURE, formats)


def _numbers(details: dict[str, Any]) -> dict[str, float]:
    """Return the numbers to log."""
    found: dict[str, float] = {}
    for part in ("test", "unseen"):
        if part in details:
            found[f"final/{part}/balanced_acc"] = details[part]["balanced_accuracy"]
            found |= {f"final/{part}/ece_{name}": error for name, error in details[part]["calibration_error"].items()}
    for name, model in details.get("personal", {}).get("models", {}).items():
        found |= {
            f"final/{name}/acc_{what}": model[what] for what in ("mean", "worst", "std") if model[what] is not None
        }
    return found


def client_rows(
    experiment: Experiment,
    state: ServerState,
    details: dict[str, Any] | None,
    personal: dict[int, Accuracies] | None = None,
) -> list[dict[str, Any]]:
    """Return a row for each client; what is not known, or must not be in a private run, is left empty.

    Args:
        experiment: the run's settings.
        state: the state after the last round.
        details: of the weights that the run keeps; None if there are no images here.
        personal: the accuracies of clients' own models after the last round; None if they have none.
    """
    data, rows = experiment.data, []
    evaluated = [name for name in COUNTS if any(name in accuracies for accuracies in (personal or {}).values())]
    own = data.true_domains or [""] * len(data.client_sizes)
    accuracies = {} if details is None else {n: d["accuracy"] for n, d in details["test"]["domains"].items()}
    for client, (size, domain) in enumerate(zip(data.client_sizes, own, strict=True)):
        rounds, loss = state.taken.get(client, (0, math.nan))
        pseudo = None if state.domains is None else state.domains.of(client)
        rows.append(
            {
                "client": client,
                "samples": size,
                "domain": domain,
                "pseudo_domain": pseudo if pseudo is None or pseudo >= 0 else None,
                "rounds": rounds if experiment.algorithm.keeps_best else None,
                "loss": None if math.isnan(loss) else loss,
                "accuracy": accuracies.get(domain),
            }
        )
        if personal is not None:
            rows[-1] |= {f"{name}_accuracy": personal.get(client, {}).get(name) for name in evaluated}
    return rows


def evaluate_clients(session: Session, state: ServerState) -> dict[int, Accuracies]:
    """Have every client that has a model of its own evaluate it after the last round; return what each answered."""
    experiment = session.experiment
    stateful = bool(experiment.private) or experiment.algorithm.has_second_model
    everyone = range(experiment.data.num_clients)
    asked = [client for client in everyone if client in state.clients or not stateful]
    context = RoundContext(state.round + 1, len(everyone), len(asked), experiment.seed_everything)
    tasks = [replace(task, personal=True) for task in make_tasks(experiment, state, state.domains, asked, context)]
    found: dict[int, Accuracies] = {}
    for answer in _answers(session, tasks):
        found[answer.client] = _accuracies(answer.metrics)
    if experiment.algorithm.by_domain:  # the model that was sent is not the global one
        asked_too = [replace(task, weights=state.weights, buffers=state.buffers) for task in tasks]
        for answer in _answers(session, asked_too):
            found.setdefault(answer.client, {})[GLOBAL] = _accuracies(answer.metrics).get(GLOBAL, math.nan)
    return {client: found[client] for client in sorted(found)}


def _answers(session: Session, tasks: Sequence[FitTask]) -> Iterator[FitResult]:
    answers = (answer for group in sharing(tasks) for answer in session.runner.fit(group))
    for done, answer in enumerate(answers, start=1):
        session.events.client_answered("personal models", done, len(tasks))
        if isinstance(answer, FitFailure):
            why = f"its own model was not evaluated: {answer.reason}"
            session.events.client_noted(tasks[0].round - 1, answer.client, why)
        else:
            yield answer


def _accuracies(counts: Mapping[str, float]) -> Accuracies:
    """Return the accuracies of counts; those that no evaluation can give are left out."""
    found: Accuracies = {}
    for suffix in IMAGES.values():
        seen = counts.get(SEEN + suffix, 0.0)
        right = {name + suffix: counts.get(name + suffix, -1.0) for name in MODELS}
        found |= {name: number / seen for name, number in right.items() if 0 <= number <= seen > 0}
    return found


def summarise(experiment: Experiment, round: int, found: Mapping[int, Accuracies]) -> dict[str, Any]:
    """Return mean, worst and standard deviation of a round's models over the clients, whose accuracies are given."""
    models: dict[str, Any] = {}
    for name in COUNTS:
        each = [accuracies[name] for accuracies in found.values() if not math.isnan(accuracies.get(name, math.nan))]
        if each:
            models[name] = {
                "clients": len(each),
                "mean": statistics.fmean(each),
                "worst": min(each),
                "std": statistics.stdev(each) if len(each) > 1 else None,
            }
    return {"round": round, "score": experiment.score, "models": models}
