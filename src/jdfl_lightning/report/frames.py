"""Tables for Python: pandas' data frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from jdfl_lightning.storage.names import DOMAIN_PREFIX, Which


def frame(rows: Sequence[Mapping[str, Any]], index: str | None = None) -> pd.DataFrame:
    """Return rows as a table.

    Args:
        rows: the cells by their columns.
        index: the column that names the rows; they are numbered if it is not given.
    """
    table = pd.DataFrame(rows)
    return table if index is None else table.set_index(index)


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
