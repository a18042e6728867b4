"""The table of runs -> experiments, and a table of their results: ``report.csv``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pandas as pd

from jdfl_lightning.joint.targets import default_alpha
from jdfl_lightning.report import published
from jdfl_lightning.report.collect import BASELINE, METHOD, PACKAGE, Settings, Value
from jdfl_lightning.report.protocol import PAPER, Protocol
from jdfl_lightning.report.published import differences, shown
from jdfl_lightning.report.statistics import ROUNDING, paired_difference, spread
from jdfl_lightning.storage.names import DOMAIN_PREFIX, UNSEEN_PREFIX, Selection
from jdfl_lightning.supervision import short_names

COLUMNS = [
    *("experiment", "protocol", "table", "algorithm", "supervision", "num_domains", "settings", "seeds"),
    *("quantity", "domain", "target", "mean", "std", "count"),
    *("difference", "difference_low", "difference_high", "difference_seeds", "verdict"),
    *("paper", "paper_gain", "paper_doubtful", "differs_from_paper"),
]
"""Columns of ``report.csv``. Accuracies are shares; a quantity is accuracy, rounds, bytes_up or bytes_down; also
unseen_accuracy, validation_accuracy, accuracy_picked_on_test, unseen_mean and unseen_worst, where they are known."""
Method: TypeAlias = tuple[str, Settings, str, Settings]
"""The columns `METHOD`, which runs share that differ only in the seed."""
Runs: TypeAlias = dict[Method, pd.DataFrame]
"""The table of runs of an experiment, by method."""
Paper: TypeAlias = tuple[published.Result | None, str]
"""The paper's result for a row, and the settings that differ from it."""
Line: TypeAlias = Any
"""A line of `Section.results`, with its cells as attributes."""
_PAPER_ORDER = ("FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "FedDC", "FedProc", "MOON")


@dataclass(frozen=True)
class Section:
    """An experiment: data set, clients, local epochs, share of clients."""

    settings: Settings
    title: str
    about: str
    """Its settings, in words."""
    domains: list[str]
    unseen: list[str]
    """The domains that no client has."""
    protocol: Protocol
    experiment: str | None
    """The paper's experiment with these settings, if the runs follow the paper's protocol."""
    runs: Runs
    results: pd.DataFrame
    """A line for each quantity of each row: `COLUMNS`, and what `_about` returns."""

    def lines(self, table: str, quantity: str, domain: str | None = None) -> list[Line]:
        """Return the lines of one quantity, one for each row of a table (and target)."""
        found = self.results[(self.results["table"] == table) & (self.results["quantity"] == quantity)]
        return list(found[found["domain"].isna() if domain is None else found["domain"] == domain].itertuples())

    @property
    def rows(self) -> list[Line]:
        """The main table: overall accuracies."""
        return self.lines("main", "accuracy")

    @property
    def sweep(self) -> list[Line]:
        """Those with a given M, where there are several of one kind: the curve over M."""
        return self.lines("num_domains", "accuracy")

    @property
    def drawn(self) -> list[Line]:
        """The main table's rows; where several M were given, one: the number of true domains, or else the median."""
        found, rows = [], self.rows
        for row in rows:
            given = sorted(other.given_domains or 0 for other in rows if other.kind == row.kind)
            typical = len(self.domains) if len(self.domains) in given else given[(len(given) - 1) // 2]
            found += [row] if row.given_domains in (None, typical) else []
        return found

    def curve(self, row: Line) -> pd.DataFrame:
        """Return mean and deviation (0 for one seed) of a row's accuracy over the rounds that every seed evaluated."""
        found = self.runs[row.method].groupby("round")["test/acc"].agg(["mean", "std", "count"])
        return found[found["count"] == len(row.accuracies)].fillna(0.0)


def compare(table: pd.DataFrame, targets: Sequence[float] = ()) -> list[Section]:
    """Sort the table of runs into experiments and rows, and derive their results.

    Args:
        table: as `read_runs` returns it.
        targets: accuracies to report rounds and bytes for; by default the mean of each algorithm's baseline.
    """
    found = [_section(settings, runs, targets) for settings, runs in table.groupby("section", sort=False)]
    order = [*published.TITLES, None]
    found.sort(key=lambda section: (order.index(section.experiment), section.about))
    sections = []
    for section in found:
        rivals = [other.settings for other in found if other.title == section.title]
        hidden = {"unseen"} | ({"domains"} if any("data.unseen" in dict(rival) for rival in rivals) else set())
        told_apart = _differing([pair for pair in section.settings if pair[0] not in hidden], rivals)
        sections.append(replace(section, title=", ".join(filter(None, (section.title, told_apart)))))
    return sections


def _section(settings: Settings, table: pd.DataFrame, targets: Sequence[float]) -> Section:
    known = dict(settings)
    domains, data = json.loads(str(known["domains"])), str(known["data"])
    unseen = json.loads(str(known.get("unseen", "[]")))
    select: Selection = "last" if known.get("select") == "last" else "val" if "data.val_fraction" in known else "test"
    options = {name.removeprefix("data."): value for name, value in settings if name.startswith("data.")}
    protocol = Protocol.of(options | ({"unseen": unseen} if unseen else {}), select)
    wanted = map(known.get, ("data.num_clients", "epochs", "client_fraction"))
    experiment = published.find_experiment(data, *wanted) if protocol.name == PAPER else None
    hidden = ("data", "domains", "unseen", "select")
    words = [f"{name.removeprefix('data.')} {value}" for name, value in settings if name not in hidden]
    words += [f"domains {' / '.join(domains)}", *(["last round"] if select == "last" else [])]
    about = ", ".join([data, *words])
    runs = dict(iter(table.sort_values("seed", kind="stable").groupby(METHOD, sort=False)))
    rows = sorted((_about(method, runs) for method in runs), key=_order)
    main: list[dict[str, Any]] = []
    sweep: list[dict[str, Any]] = []
    for row in rows:
        given = {other["given_domains"] for other in rows if other["kind"] == row["kind"]}
        if row["given_domains"] is None or None not in given:  # else the row with a chosen M represents it
            lines = _lines(row, runs, domains, targets, _paper(row, settings, experiment, m_is_chosen=True))
            further = _protocol_lines(runs[row["method"]], protocol, unseen)
            main += [row | {"table": "main"} | line for line in (*lines, *further)]
        if row["given_domains"] is not None and len(given - {None}) > 1:
            line = next(_lines(row, runs, (), (), _paper(row, settings, experiment, m_is_chosen=False)))
            sweep.append(row | {"table": "num_domains"} | line)
    empty: dict[str, Any] = dict.fromkeys(COLUMNS)
    return Section(
        settings=settings,
        title=data.rpartition(".")[2] if experiment is None else published.TITLES[experiment],
        about=about,
        domains=domains,
        unseen=unseen,
        protocol=protocol,
        experiment=experiment,
        runs=runs,
        results=pd.DataFrame(
            [empty | {"experiment": about, "protocol": protocol.name} | line for line in (*main, *sweep)], dtype=object
        ),
    )


def _about(method: Method, runs: Runs) -> dict[str, Any]:
    """Return the columns that all lines of a row share."""
    algorithm, training, supervision, joint = method
    best = runs[method][runs[method]["best"]]
    of_algorithm = tuple(pair for pair in training if pair[0].startswith("algorithm"))
    others = tuple(pair for pair in training if pair not in of_algorithm)
    training_settings = (
        _differing(of_algorithm, [rival for name, rival, _, _ in runs if name == algorithm]),
        _differing(others, [rival for _, rival, _, _ in runs]),
    )
    rivals = [(*joint, *rival) for _, _, name, rival in runs if name == supervision]  # absent is not different
    joint_settings = _differing([pair for pair in joint if pair[0] != "num_domains"], rivals)
    m_alone = ("num_domains", "clustering.criterion", "clustering.max_domains")
    return {
        "method": method,
        "setup": (algorithm, training),  # what a row has in common with its baseline
        "kind": (*method[:3], tuple(pair for pair in joint if pair[0] not in m_alone)),  # rows that differ in M alone
        "algorithm": algorithm,
        "supervision": supervision,
        "given_domains": dict(joint).get("num_domains"),
        "num_domains": " ".join(map(str, sorted(set(best["num_domains"])))),
        "training_settings": ", ".join(filter(None, training_settings)),
        "joint_settings": joint_settings,
        "settings": ", ".join(filter(None, (*training_settings, joint_settings))),
        "seeds": " ".join(map(str, best["seed"])),
        "accuracies": tuple(best["test/acc"]),
    }


def _differing(settings: Iterable[tuple[str, Value]], rivals: Sequence[Settings]) -> str:
    """Name the settings that some rivals lack or have with another value."""
    return ", ".join(
        f"{name.removeprefix('data.').removeprefix('supervision.')} {shown(value)}"
        for name, value in settings
        if any(dict(rival).get(name, ...) != value for rival in rivals)
    )


def method_order(algorithm: str, supervision: str) -> tuple[int, str, int]:
    """Return the sort key of a method: the paper's order of algorithms, then of supervisions."""
    known = _PAPER_ORDER.index(algorithm) if algorithm in _PAPER_ORDER else len(_PAPER_ORDER)
    names = list(short_names())
    return known, algorithm, names.index(supervision) if supervision in names else len(names)


def _order(row: dict[str, Any]) -> tuple[object, ...]:
    algorithm, training, supervision, joint = row["method"]
    *of_algorithm, of_supervision = method_order(algorithm, supervision)
    return *of_algorithm, str(training), of_supervision, row["given_domains"] or 0, str(joint)


def _lines(
    row: dict[str, Any], runs: Runs, domains: Sequence[str], targets: Sequence[float], paper: Paper
) -> Iterator[dict[str, Any]]:
    """Yield the results of a row: accuracy, accuracy of each domain, and the cost of reaching the targets."""
    own, base = runs[row["method"]], runs.get((*row["setup"], BASELINE, ()))
    best = own[own["best"]]
    yield _quantity("accuracy", best["test/acc"]) | _difference(row, best, base) | _printed(paper)
    for name in domains:
        yield _quantity("accuracy", best[DOMAIN_PREFIX + name]) | {"domain": name} | _printed(paper, name)
    for target in targets or ([] if base is None else [spread(list(base[base["best"]]["test/acc"])).mean]):
        reached = own[own["test/acc"] >= target - ROUNDING].drop_duplicates("seed")
        for name, column in (("rounds", "round"), ("bytes_up", "bytes/up"), ("bytes_down", "bytes/down")):
            yield _quantity(name, reached[column]) | {"target": target}


def _protocol_lines(own: pd.DataFrame, protocol: Protocol, unseen: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a row's further accuracies: on unseen domains, and as if the round were picked on the test images."""
    best = own[own["best"]]
    for name in unseen:
        yield _quantity("unseen_accuracy", best[UNSEEN_PREFIX + name]) | {"domain": name}
    if protocol.select == "val":
        yield _quantity("validation_accuracy", best["val/acc"])
    if protocol.select != "test":
        yield _quantity("accuracy_picked_on_test", own[own["best_on_test"]]["test/acc"])


def _quantity(name: str, values: Iterable[float]) -> dict[str, Any]:
    found = spread(list(values))
    mean = None if math.isnan(found.mean) else found.mean
    return {"quantity": name, "mean": mean, "std": found.std, "count": float(found.count)}


def _difference(row: dict[str, Any], best: pd.DataFrame, base: pd.DataFrame | None) -> dict[str, Any]:
    """Return the accuracy minus the baseline's over the seeds that both have; empty for the baseline."""
    if row["supervision"] == BASELINE:
        return {}
    base = best.iloc[:0] if base is None else base[base["best"]]
    found = paired_difference(*(runs.set_index("seed")["test/acc"].to_dict() for runs in (best, base)))
    if found is None:
        return {"verdict": "no base to compare"}
    seeds = " ".join(map(str, found.seeds))
    ends = {"difference_low": found.low, "difference_high": found.high}
    return {"difference": found.mean, **ends, "difference_seeds": seeds, "verdict": found.verdict}


def _paper(row: dict[str, Any], settings: Settings, experiment: str | None, m_is_chosen: bool) -> Paper:
    """Return the paper's result for a row, and the differing settings; its main table has M chosen by elbow."""
    algorithm, training, supervision, joint = row["method"]
    if experiment is None or not str(dict(training)["algorithm"]).startswith(PACKAGE):
        return None, ""  # also if a user's class has the name of one of the paper's
    result, m = published.find_result(experiment, algorithm, supervision), row["given_domains"]
    if result is not None and not m_is_chosen:
        value = published.num_domains_curve().get((supervision, m))
        known = (experiment, algorithm) == (published.M_CURVE, "FedAvg")
        result = published.Result(algorithm, supervision, value) if known and value else None
    mine: dict[str, Value] = dict((*settings, *training, *joint)) | {"seeds": len(row["accuracies"])}
    alphas = {default_alpha(int(number)) for number in row["num_domains"].split()}
    parts = differences(experiment, algorithm, mine, alphas)
    parts += [f"M {m} given (paper by elbow)"] if m_is_chosen and m is not None else []
    return result, ", ".join(parts)


def _printed(paper: Paper, domain: str | None = None) -> dict[str, Any]:
    """Return the paper's values overall, or for a domain."""
    result, differs = paper
    if result is None or (domain is not None and domain not in result.domains):
        return {}
    value, gain = (result.overall, result.gain) if domain is None else (result.domains[domain], None)
    return {
        "paper": round(value / 100, 4),
        "paper_gain": None if gain is None else round(gain / 100, 4),
        "paper_doubtful": "yes" if result.doubts("overall" if domain is None else domain) else "no",
        "differs_from_paper": differs,
    }
