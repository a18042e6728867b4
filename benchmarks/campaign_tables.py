"""Tables and figure of the campaign, from its run folders: see campaign.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from scipy import stats

from jdfl_lightning import paired_difference, spread

SHORT = re.compile(r"(?P<algorithm>[a-z]+)-(?P<supervision>[a-z]+)-seed(?P<seed>\d+)")


def read_runs(folder: Path) -> pd.DataFrame:
    """Return a row for each finished run: what it is, and its accuracies (%) in the round picked on validation."""
    rows = []
    for study in sorted(path for path in folder.iterdir() if path.is_dir()):
        part, setting, *changes = study.name.split("-", 2)
        for run in sorted(study.iterdir()):
            name = SHORT.fullmatch(run.name)
            if name is None or not (run / "clients.csv").is_file():
                continue
            settings = yaml.safe_load((run / "config.yaml").read_text().partition("\n")[2])
            metrics = pd.read_csv(run / "metrics.csv")
            if len(metrics) < settings["rounds"]:
                continue
            picked = metrics.loc[metrics["val/acc"].idxmax()]
            unseen = settings["data"]["init_args"].get("unseen")
            change = changes[0] if changes else ""
            rows.append(
                {
                    "part": part,
                    "setting": setting,
                    "change": "" if part in ("rates", "unseen") else change,
                    "unseen": unseen or "",
                    **name.groupdict(),
                    "lr": settings["lr"],
                    "round": int(picked["round"]),
                    "val": 100 * picked["val/acc"],
                    "test": 100 * picked["test/acc"],
                    "last": 100 * metrics.iloc[-1]["test/acc"],
                    "worst": 100 * picked["test/acc_worst"],
                    "unseen_acc": 100 * picked["unseen/acc"] if unseen else None,
                }
            )
    found = pd.DataFrame(rows)
    if not found.empty:
        found["seed"] = found["seed"].astype(int)
    return found


def holm(values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p values.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(values)), key=lambda place: values[place])
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, (len(values) - rank) * values[place])
        adjusted[place] = min(1.0, largest)
    return adjusted


def compare(ours: pd.Series, base: pd.Series) -> dict[str, Any]:
    """Return the paired difference of two series of accuracies by seed: mean, interval, p and Cohen's d."""
    found = paired_difference(ours.to_dict(), base.to_dict())
    if found is None:
        return {"seeds": 0}
    values = [ours[seed] - base[seed] for seed in found.seeds]
    about = spread(values)
    flat = about.std is None or about.std < 1e-9
    p = 1.0 if flat else float(stats.ttest_1samp(values, 0).pvalue)
    effect = 0.0 if about.std is None or flat else about.mean / about.std
    numbers = {"mean": found.mean, "low": found.low, "high": found.high, "p": p, "d": effect}
    return {"seeds": len(found.seeds), **numbers}


def differences(runs: pd.DataFrame, measure: str = "test") -> pd.DataFrame:
    """Return every supervision minus base of the same part, setting and algorithm, Holm-corrected within a part."""
    rows = []
    for keys, group in runs.groupby(["part", "setting", "change", "algorithm", "lr"]):
        values = {name: own.groupby("seed")[measure].mean() for name, own in group.groupby("supervision")}
        for name, own in values.items():
            if name != "base" and "base" in values:
                labels = dict(zip(("part", "setting", "change", "algorithm", "lr"), keys, strict=True))
                rows.append(labels | {"supervision": name, **compare(own, values["base"])})
    return pd.DataFrame(rows)
