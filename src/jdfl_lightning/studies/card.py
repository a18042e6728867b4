"""The card of a model: what it is, how it was trained, how well it does, and what that does not say."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from jdfl_lightning.report.markup import render
from jdfl_lightning.storage.folder import SavedRun
from jdfl_lightning.storage.names import DOMAIN_PREFIX, Which
from jdfl_lightning.storage.weights import ModelHeader

_SHOWN = (
    *("seed_everything", "rounds", "client_fraction", "epochs", "batch_size", "lr", "momentum", "weight_decay"),
    *("num_domains", "head_init"),
)
"""Settings that are listed, where a run has them."""
_DATA = ("num_clients", "test_fraction", "val_fraction", "unseen", "domain_mix", "label_skew", "drop_duplicates")


def model_card(header: ModelHeader, run: SavedRun, which: Which) -> str:
    """Return the card as Markdown, with the front matter that model hubs read.

    Args:
        header: description of the model.
        run: the run that it comes from.
        which: which of the run's weights it has.
    """
    config, row = run.config, run.ends[which]
    data = config.get("data", {})
    arguments = data.get("init_args", {}) if isinstance(data, dict) else {}
    name, algorithm, supervision = (_class(config.get(key)) for key in ("data", "algorithm", "supervision"))
    found = run.discovery
    protocol = [("data", name), *((key, arguments[key]) for key in _DATA if key in arguments)]
    protocol += [("algorithm", algorithm), ("supervision", supervision)]
    protocol += [(key, config[key]) for key in _SHOWN if config.get(key) is not None]
    domains = {key.removeprefix(DOMAIN_PREFIX): row[key] for key in row if key.startswith(DOMAIN_PREFIX)}
    accuracies = {"all domains": row["test/acc"], "the worst domain": row["test/acc_worst"]} | domains
    return render(
        "card.md",
        header=header,
        data=name,
        num_domains=None if found is None else found["num_domains"],
        protocol=protocol,
        round=int(row["round"]),
        rounds=len(run.rows),
        accuracies={key: "-" if math.isnan(value) else f"{100 * value:.2f} %" for key, value in accuracies.items()},
        limits=list(_limits(header, run, which)),
    )


def _limits(header: ModelHeader, run: SavedRun, which: Which) -> Iterable[str]:
    if which == "best" and run.keeps_best:
        yield "The round was picked by these same held-out images, so that the accuracy is flattered."
    yield "One run, with one seed: other seeds give other numbers."
    yield "Other domains and other things were not tested: the network names one of its classes for any image."
    yield "Clients were simulated, or held by sites of one federation; what they hold decides what the network knows."
    epsilon = next((value for key, value in run.last.items() if key.endswith("epsilon")), None)
    if epsilon is not None and math.isfinite(epsilon):
        yield f"Client-level differential privacy with epsilon {epsilon:.3g}."
    else:
        yield "No differential privacy: weights may reveal something of the training images."
    if header.backbone != "PaperCNN":
        yield f"The network {header.backbone} may have been pretrained: its weights have terms of their own."


def _class(value: Any) -> str:
    """Return the name of a class of the settings, with its arguments where they are plain."""
    if not isinstance(value, dict):
        return str(value)
    return str(value.get("class_path", "")).rpartition(".")[2]
