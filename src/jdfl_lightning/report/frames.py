"""Tables for Python: pandas' data frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from jdfl_lightning.joint.targets import default_alpha, graded_table
from jdfl_lightning.storage.names import DOMAIN_PREFIX, Which


def frame(rows: Sequence[Mapping[str, Any]], index: str | None = None) -> pd.DataFrame:
    """Return rows as a table.

    Args:
        rows: the cells by their columns.
        index: the column that names the rows; they are numbered if it is not given.
    """
    table = pd.DataFrame(rows)
    return table if index is None else table.set_index(index)


def clients_frame(record: Mapping[str, Any]) -> pd.DataFrame:
    """Return the pseudo-domain of each client and, where it is known, its true domain.

    Args:
        record: ``discovery.json``.
    """
    members = {name: {"pseudo_domain": domain} for name, domain in record["assignments"].items()}
    for name, true_domain in record.get("true_domains", {}).items():
        members[name]["true_domain"] = true_domain
    for name, joined in record.get("joined", {}).items():
        members[name] = {"pseudo_domain": joined["domain"]}
        members[name] |= {"true_domain": joined["true_domain"]} if "true_domain" in joined else {}
    return frame([{"client": _number(name)} | row for name, row in members.items()], "client")


def choice_frame(record: Mapping[str, Any]) -> pd.DataFrame:
    """Return inertia and silhouette for each number M of pseudo-domains that was tried.

    Args:
        record: ``discovery.json``.
    """
    table = pd.DataFrame({name: record[name] for name in ("inertias", "silhouettes")})
    table.index = table.index.astype(int)
    table.columns = ["inertia", "silhouette"]
    return table.sort_index().rename_axis("num_domains")


def graded_frame(record: Mapping[str, Any], alpha: float | None, tau: float) -> pd.DataFrame:
    """Return the weights that graded targets give to each pseudo-domain: a row for a client's own pseudo-domain.

    Args:
        record: ``discovery.json``.
        alpha: mass on the own pseudo-domain; None for the paper's.
        tau: temperature over the similarities.
    """
    similarities = torch.tensor(record["similarities"], dtype=torch.float64)
    weights = graded_table(similarities, default_alpha(len(similarities)) if alpha is None else alpha, tau)
    return pd.DataFrame(weights.numpy()).rename_axis("own", axis=0).rename_axis("pseudo_domain", axis=1)


def accuracy_html(rows: Mapping[Which, Mapping[str, float]]) -> str:
    """Return accuracies as an HTML table in per cent, with the names escaped.

    Args:
        rows: the metrics of each kind of saved weights.
    """
    names = {"round": "round", "test/acc": "overall", "test/acc_worst": "worst domain"}
    columns = next(iter(rows.values()))
    domains = {name: name.removeprefix(DOMAIN_PREFIX) for name in columns if name.startswith(DOMAIN_PREFIX)}
    table = pd.DataFrame(rows).T[[*names, *domains]].rename(columns=names | domains)
    percent = table.drop(columns="round").mul(100).map("{:.2f}".format)
    percent.insert(0, "round", table["round"].astype(int))
    return str(percent.to_html(border=0))


def _number(name: object) -> object:
    """Return a client's number where it has one: in a run; groups of data have names."""
    return int(name) if isinstance(name, str) and name.isdecimal() else name
