"""The paper's results, copied from its tables and figures, the settings that it states, and what differs in a run.

Accuracies are per cent at the best round, means of three seeds. Columns of domains follow the heads of the paper's
tables: the captions of settings B and C list the domains in another order, in which no row adds up.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from jdfl_lightning.config import Experiment
from jdfl_lightning.core.settings import declared_settings
from jdfl_lightning.data.base import option_defaults

TITLES = {
    "office_caltech": "Office-Caltech",
    "pacs_a": "PACS, setting A",
    "pacs_b": "PACS, setting B",
    "pacs_c": "PACS, setting C",
}
"""The paper's experiments: name here -> title."""
M_CURVE = "pacs_b"
"""The experiment whose number of pseudo-domains was varied, with FedAvg."""
DISCOVERY_SEEDS = 5
"""Number of seeds in the two discovery grids, which are on PACS."""


@dataclass(frozen=True)
class Result:
    """A row of one of the paper's tables."""

    algorithm: str
    supervision: str
    overall: float
    gain: float | None = None
    """Gain as printed, over the same algorithm's base."""
    domains: Mapping[str, float] = field(default_factory=dict)
    """Accuracy of each domain; empty where the paper has only the overall accuracy."""
    doubtful: frozenset[str] = frozenset()
    """Cells that no count of test images over three seeds can give; ``sum`` if all are possible but do not add up."""

    def doubts(self, cell: str) -> bool:
        """Return whether ``overall`` or a domain's accuracy may be a misprint."""
        return cell in self.doubtful or "sum" in self.doubtful


@cache
def _rows(name: str) -> list[dict[str, Any]]:
    lines = csv.DictReader((files(__package__) / f"{name}.csv").read_text().splitlines())
    return [{column: _value(text) for column, text in line.items()} for line in lines]


def _value(text: str) -> int | float | str | None:
    """Return what a cell says: a number, a name, or nothing."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text or None


def _by_keys(name: str) -> dict[Any, float]:
    """Return the last column of a table by the others."""
    return {tuple(keys): value for *keys, value in map(dict.values, _rows(name))}


def domain_results(experiment: str) -> list[Result]:
    """Return an experiment's table of accuracies for each domain.

    >>> domain_results("pacs_b")[0].domains
    {'art_painting': 45.04, 'cartoon': 72.2, 'photo': 69.26, 'sketch': 76.68}
    """
    found = []
    for row in _rows(experiment):
        algorithm, supervision, overall, gain, *accuracies, doubtful = row.values()
        domains = dict(zip(list(row)[4:-1], accuracies, strict=True))
        found.append(Result(algorithm, supervision, overall, gain, domains, frozenset((doubtful or "").split())))
    return found


def main_table() -> dict[tuple[str, str, str], tuple[float, float | None]]:
    """Return the paper's main table: (experiment, algorithm, supervision) -> accuracy and printed gain."""
    return {tuple(keys): (accuracy, gain) for *keys, accuracy, gain in map(dict.values, _rows("main"))}


def ablation() -> dict[tuple[str, str], float]:
    """Return FedAvg's bars, the hard joint head among them: (experiment, supervision) -> accuracy."""
    return _by_keys("ablation")


def num_domains_curve() -> dict[tuple[str, int], float]:
    """Return FedAvg's accuracy on `M_CURVE` by M: (supervision, M) -> accuracy; the base has M = 1."""
    return _by_keys("num_domains")


def ari_grid() -> dict[tuple[int, int, str], float]:
    """Return the agreement of clusters and domains, 40 clients, M = 4: (E_0, batch size, layers) -> ARI."""
    return _by_keys("ari")


def elbow_grid() -> dict[tuple[int, int, int, str], float]:
    """Return how often the elbow was at 4: (clients, E_0, batch size, layers) -> share of the seeds."""
    return _by_keys("elbow")


def find_result(experiment: str, algorithm: str, supervision: str) -> Result | None:
    """Return the paper's result for an algorithm and a supervision; None if there is none."""
    for result in domain_results(experiment):
        if (result.algorithm, result.supervision) == (algorithm, supervision):
            return result
    if algorithm == "FedAvg" and (experiment, supervision) in (bars := ablation()):
        return Result(algorithm, supervision, bars[experiment, supervision])
    return None


def stated_settings(experiment: str, algorithm: str) -> dict[str, float | str]:
    """Return the settings of an experiment that the paper states, by their names in a config.

    ``seeds`` is their number. Not stated, so not here: the batch size, and FedDC's alpha in setting C.

    >>> stated_settings("pacs_a", "FedProc")["rounds"], stated_settings("pacs_b", "FedDC")["algorithm.alpha"]
    (300, 0.1)
    """
    found: dict[str, float | str] = {}
    for wanted in (None, algorithm):  # settings of one algorithm override those of all
        for row in _rows("settings"):
            if row["experiment"] in (None, experiment) and row["algorithm"] == wanted:
                found[row["setting"]] = row["value"]
    return found


def find_experiment(data: str, num_clients: object, epochs: object, client_fraction: object) -> str | None:
    """Return the paper's experiment with a data set, clients, local epochs and share of clients; None if there is none.

    >>> find_experiment("PACS", 40, 3, 0.5)
    'pacs_c'
    """
    wanted = {"data": data, "data.num_clients": num_clients, "epochs": epochs, "client_fraction": client_fraction}
    for experiment in TITLES:
        stated = stated_settings(experiment, "")
        if all(stated[name] == value for name, value in wanted.items()):
            return experiment
    return None


_NOT_IN_PAPER: dict[str, object] = {
    "algorithm.weighting": "samples",
    **{
        setting.name: json.dumps(setting.default) if isinstance(setting.default, list) else setting.default
        for setting in declared_settings(Experiment)
        if not setting.in_paper
    },
    **{f"data.{name}": value for name, value in option_defaults().items()},
}
"""Settings that the paper does not have, with the values that leave them unused."""


def shown(value: object) -> str:
    """Return a setting's value as written in a config.

    >>> shown(None), shown(1.0), shown("B")
    ('null', '1', 'B')
    """
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def differences(
    experiment: str, algorithm: str, settings: Mapping[str, object], alphas: Collection[float]
) -> list[str]:
    """Name the settings that differ from the paper's, with its value.

    Args:
        experiment: the paper's experiment.
        algorithm: name of the algorithm.
        settings: the run's settings by their names in a config, and ``seeds``, their number.
        alphas: the paper's alpha for the run's numbers of pseudo-domains.

    >>> differences("pacs_b", "FedAvg", {"rounds": 3, "supervision.alpha": 0.5, "min_clients": 2}, {0.55})
    ['rounds 3 (paper 150)', 'alpha 0.5 (paper 0.55)', 'min_clients 2 (not in the paper)']
    """
    parts = [
        f"{name.removeprefix('data.').removeprefix('supervision.')} {shown(settings[name])} (paper {shown(value)})"
        for name, value in stated_settings(experiment, algorithm).items()
        if name in settings and settings[name] != value
    ]
    alpha = settings.get("supervision.alpha")
    if alpha is not None and set(alphas) != {alpha}:
        parts.append(f"alpha {shown(alpha)} (paper {' or '.join(map(shown, sorted(alphas)))})")
    parts += [
        f"{name.removeprefix('data.').removeprefix('supervision.')} {shown(settings[name])} (not in the paper)"
        for unused, value in _NOT_IN_PAPER.items()
        for name in settings
        if (name == unused or name.startswith(f"{unused}.")) and settings[name] != value
    ]
    return parts
