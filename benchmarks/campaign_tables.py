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

RUNS = Path(__file__).parents[1] / "docs" / "results" / "features.csv"
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
                    "change": "" if part in ("rates", "unseen", "tuning", "tuned") else change,
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


def published() -> pd.DataFrame:
    """Return the runs that the documentation has already."""
    return pd.read_csv(RUNS, keep_default_na=False, na_values={"unseen_acc": ""})


def all_runs(folder: Path) -> pd.DataFrame:
    """Return the runs of the documentation and those of a folder; where both have a run, that of the folder."""
    what = ["part", "setting", "change", "unseen", "algorithm", "supervision", "seed", "lr"]
    runs = pd.concat([published(), read_runs(folder)], ignore_index=True)
    return runs.drop_duplicates(what, keep="last").sort_values(what, ignore_index=True)


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


LABELS = {"pacs_a": "PACS A", "pacs_b": "PACS B", "office": "Office-Caltech"}
OPTIMIZERS = {"fedavg": "FedAvg", "scaffold": "SCAFFOLD", "feddyn": "FedDyn", "feddc": "FedDC", "fedproc": "FedProc"}
MODES = ("base", "hard", "graded", "random", "uniform", "em", "online")
LEAST = 3
"""Seeds from which on a difference is shown: an interval from two of them says nothing."""
FRESH = 5
"""The first seed that nobody had looked at when the plan got its comparison of hard labels."""
TUNED = 4
"""Comparisons that the plan makes at each one's own rate: two optimizers, two settings."""
KEYS = ["part", "setting", "change", "algorithm", "lr"]


def by_seed(runs: pd.DataFrame, measure: str) -> dict[tuple[Any, ...], dict[str, pd.Series]]:
    """Return the measure by seed for each experiment and supervision; over unseen domains, the mean of whole seeds."""
    found: dict[tuple[Any, ...], dict[str, pd.Series]] = {}
    for keys, group in runs.groupby(KEYS):
        domains = group["unseen"].nunique()
        for name, own in group.groupby("supervision"):
            seeds = own.groupby("seed")[measure].agg(["mean", "count"])
            found.setdefault(tuple(keys), {})[str(name)] = seeds.loc[seeds["count"] == domains, "mean"]
    return found


def differences(runs: pd.DataFrame, measure: str = "test") -> pd.DataFrame:
    """Return every supervision minus base of the same experiment, with Holm's correction over all rows."""
    rows = []
    for keys, values in by_seed(runs, measure).items():
        for name, own in values.items():
            if name != "base" and "base" in values:
                found = compare(own, values["base"])
                if found["seeds"] >= LEAST:
                    rows.append(dict(zip(KEYS, keys, strict=True)) | {"supervision": name} | found)
    table = pd.DataFrame(rows)
    if not table.empty:
        table["holm"] = holm(list(table["p"]))
    return table


def accuracy_table(runs: pd.DataFrame, measure: str = "test") -> str:
    """Return mean accuracies and differences to base as Markdown, a row for each experiment and measure."""
    table = differences(runs, measure)
    lines = ["| | " + " | ".join(MODES) + " | seeds |", "|---" * (len(MODES) + 2) + "|"]
    for keys, values in by_seed(runs, measure).items():
        label = _place(keys[3], keys[1])
        means = [f"{values[mode].mean():.2f}" if mode in values and len(values[mode]) else "" for mode in MODES]
        lines.append(f"| {label} | {' | '.join(means)} | {max(len(own) for own in values.values())} |")
        if not table.empty:
            own = table[(table[KEYS] == list(keys)).all(axis=1)].set_index("supervision")
            cells = [_difference(own.loc[mode]) if mode in own.index else "" for mode in MODES]
            lines.append(f"| minus base | {' | '.join(cells)} | |")
    return "\n".join(lines)


def _difference(row: Any) -> str:
    """Return a difference with half the width of its interval, and a star if it is significant after correction."""
    half = "" if row["low"] is None else f" ± {(row['high'] - row['low']) / 2:.2f}"
    return f"{row['mean']:+.2f}{half}" + (" \\*" if row["holm"] < 0.05 else "")


def p_value(p: float) -> str:
    """Return a p as text: no p is 0."""
    return "< 0.0001" if p < 0.00005 else f"{p:.4f}"


def claims_table(runs: pd.DataFrame, measure: str = "test", claimed: Sequence[str] = ("graded", "random")) -> str:
    """Return the comparisons that the plan makes claims of: supervisions minus base, corrected over these alone."""
    chosen = runs[runs["supervision"].isin(["base", *claimed])]
    table = differences(chosen, measure)
    labels = [f"{row['supervision']} - base, {_place(row['algorithm'], row['setting'])}" for _, row in table.iterrows()]
    return _claims(labels, table)


def _place(algorithm: str, setting: str) -> str:
    return f"{OPTIMIZERS[algorithm]}, {LABELS[setting]}"


def _claims(labels: Sequence[str], table: pd.DataFrame) -> str:
    """Return comparisons as Markdown, each in a line."""
    if table.empty:
        return f"Fewer than {LEAST} seeds so far: no comparison."
    lines = [
        "| | seeds | difference (points) | 95 % interval | p | p, Holm | Cohen's d |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, (_, row) in zip(labels, table.iterrows(), strict=True):
        numbers = f"{row['mean']:+.2f} | {row['low']:+.2f} to {row['high']:+.2f}"
        ps = f"{p_value(row['p'])} | {p_value(row['holm'])}"
        lines.append(f"| {label} | {row['seeds']:.0f} | {numbers} | {ps} | {row['d']:+.2f} |")
    return "\n".join(lines)


def best_rates(runs: pd.DataFrame) -> dict[tuple[str, str, str], float]:
    """Return, for each setting, algorithm and supervision of part `tuning`, its best rate by mean validation.

    Only if all of the plan's runs are there: fewer seeds could pick another rate.
    """
    own = runs[runs["part"] == "tuning"]
    means = own.groupby(["setting", "algorithm", "supervision", "lr"])["val"].agg(["mean", "count"])
    if len(means) != TUNED * 2 * 5 or (means["count"] != 5).any():
        raise SystemExit("Expected all runs of part tuning first: --parts tuning.")
    return {keys: float(group.idxmax()[-1]) for keys, group in means["mean"].groupby(level=[0, 1, 2])}


def tuned_table(runs: pd.DataFrame) -> str:
    """Return graded minus base, each at its best rate, on seeds of their own; nothing before all of them are done."""
    own, rates, labels, rows = runs[runs["part"] == "tuned"], best_rates(runs), [], []
    for (setting, algorithm), group in own.groupby(["setting", "algorithm"]):
        at = {name: rates[setting, algorithm, name] for name in ("graded", "base")}
        series = {
            name: group[(group["supervision"] == name) & (group["lr"] == rate)].set_index("seed")["test"]
            for name, rate in at.items()
        }
        labels.append(f"graded at {at['graded']:g} - base at {at['base']:g}, {_place(algorithm, setting)}")
        rows.append(compare(series["graded"], series["base"]))
    if [row["seeds"] for row in rows] != [20] * TUNED:
        raise SystemExit("Expected all runs of part tuned first: --parts tuned.")
    return _claims(labels, pd.DataFrame(rows).assign(holm=holm([row["p"] for row in rows])))


def tuning_table(runs: pd.DataFrame) -> str:
    """Return validation accuracy by rate for each optimizer, setting and supervision, the picked one bold."""
    own, best = runs[runs["part"] == "tuning"], best_rates(runs)
    means = own.groupby(["setting", "algorithm", "supervision", "lr"])["val"].mean()
    rates = sorted(own["lr"].unique())
    header = "| validation accuracy | " + " | ".join(f"{rate:g}" for rate in rates) + " |"
    lines = [header, "|---" * (len(rates) + 1) + "|"]
    for keys, picked in best.items():
        cells = [f"{means[(*keys, rate)]:.2f}" for rate in rates]
        cells = [f"**{cell}**" if rate == picked else cell for cell, rate in zip(cells, rates, strict=True)]
        lines.append(f"| {keys[2]}, {_place(keys[1], keys[0])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rates_table(runs: pd.DataFrame) -> str:
    """Return validation and test accuracy by rate, and each supervision at its own best rate minus base at its."""
    rates = sorted(runs["lr"].unique())
    lines = [
        "| test (validation) | " + " | ".join(f"{rate:g}" for rate in rates) + " | best by validation | minus base |"
    ]
    lines.append("|---" * (len(rates) + 3) + "|")
    best = {}
    for mode in [mode for mode in MODES if mode in set(runs["supervision"])]:
        own = runs[runs["supervision"] == mode]
        mean = own.groupby("lr")[["test", "val"]].mean()
        best[mode] = own[own["lr"] == mean["val"].idxmax()].set_index("seed")["test"]
        cells = [
            f"{mean.loc[rate, 'test']:.2f} ({mean.loc[rate, 'val']:.2f})" if rate in mean.index else ""
            for rate in rates
        ]
        found = {} if mode == "base" else compare(best[mode], best["base"])
        last = (
            f"{found['mean']:+.2f} [{found['low']:+.2f}, {found['high']:+.2f}]" if found.get("low") is not None else ""
        )
        lines.append(f"| {mode} | {' | '.join(cells)} | {mean['val'].idxmax():g} | {last} |")
    return "\n".join(lines)


def controls_table(runs: pd.DataFrame) -> str:
    """Return the controls minus base, and random minus uniform, seed by seed."""
    rows = []
    for setting in [name for name in LABELS if name in set(runs[runs["part"] == "controls"]["setting"])]:
        own = runs[(runs["setting"] == setting) & runs["part"].isin(["fedavg", "controls"])]
        series = {}
        for (change, mode), group in own[own["algorithm"] == "fedavg"].groupby(["change", "supervision"]):
            series[f"{mode}{', ' + change if change else ''}"] = group.set_index("seed")["test"]
        pairs = [(name, "base") for name in series if name != "base"] + [("random", "uniform")]
        for first, second in pairs:
            if first in series and second in series:
                rows.append({"pair": f"{first} - {second}, {LABELS[setting]}"} | compare(series[first], series[second]))
    rows = [row for row in rows if row.get("low") is not None]
    lines = ["| | seeds | difference (points) | 95 % interval | p, Holm |", "|---|---|---|---|---|"]
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        numbers = f"{row['mean']:+.2f} | {row['low']:+.2f} to {row['high']:+.2f} | {p_value(p)}"
        lines.append(f"| {row['pair']} | {row['seeds']} | {numbers} |")
    return "\n".join(lines)


def draw(runs: pd.DataFrame, file: Path) -> None:
    """Draw all paired differences to base with their intervals."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    from jdfl_lightning.supervision import short_names

    colours = {name: kind.colour for name, kind in short_names().items()}
    groups = [("test", runs[runs["part"].isin(["fedavg", "others"])], "test accuracy, linear head")]
    groups += [("test", runs[runs["part"] == "hidden"], "test accuracy, hidden layer")]
    groups += [("unseen_acc", runs[runs["part"] == "unseen"], "accuracy on the unseen domain")]
    groups = [(measure, own, title) for measure, own, title in groups if not differences(own, measure).empty]
    heights = [differences(own, measure).groupby(KEYS).ngroups for measure, own, _ in groups]
    figure, axes = plt.subplots(
        len(groups), 1, figsize=(8, 1.2 + 0.62 * sum(heights) + 0.6 * len(groups)), height_ratios=heights, squeeze=False
    )
    for axis, (measure, own, title) in zip(axes[:, 0], groups, strict=True):
        table = differences(own, measure)
        labels = list(dict.fromkeys(zip(table["algorithm"], table["setting"], strict=True)))
        for _, row in table.iterrows():
            place = labels.index((row["algorithm"], row["setting"]))
            at = place + 0.12 * (MODES[1:].index(row["supervision"]) - 2.5)
            if row["low"] is not None:
                axis.plot([row["low"], row["high"]], [at, at], color=colours[row["supervision"]], linewidth=1.5)
            axis.plot(row["mean"], at, "o", color=colours[row["supervision"]], markersize=4)
        axis.axvline(0, color="black", linewidth=0.8)
        seeds = table.groupby(["algorithm", "setting"])["seeds"].max()
        axis.set_yticks(range(len(labels)), [f"{OPTIMIZERS[a]}, {LABELS[s]} ({seeds[a, s]} seeds)" for a, s in labels])
        axis.invert_yaxis()
        axis.grid(axis="x", alpha=0.3)
        axis.set_title(f"{title}: minus base (points), 95 % intervals", fontsize=10, loc="left")
    handles = [plt.Line2D([], [], color=colours[mode], marker="o", label=mode) for mode in MODES[1:]]
    figure.legend(handles=handles, loc="lower center", ncols=6, frameon=False)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(file, dpi=130)


def write_page(folder: Path) -> None:
    """Write runs.csv, the figure and the tables of docs/results/features.md."""
    from timing import DOCS, write_section

    runs = all_runs(folder)
    tuned, tuning = tuned_table(runs), tuning_table(runs)  # first, as it ends here if they are not all done
    page = "results/features.md"
    runs.round(4).to_csv(RUNS, index=False)
    draw(runs, DOCS / "results" / "features.png")
    fedavg, unseen = runs[runs["part"] == "fedavg"], runs[runs["part"] == "unseen"]
    write_section("primary", claims_table(fedavg), page)
    fresh = fedavg[fedavg["setting"].isin(["pacs_a", "pacs_b"]) & (fedavg["seed"] >= FRESH)]
    write_section("hard labels", claims_table(fresh, claimed=["hard"]), page)
    write_section("accuracies", accuracy_table(fedavg), page)
    write_section("worst domain", accuracy_table(fedavg, "worst"), page)
    write_section("last round", accuracy_table(fedavg, "last"), page)
    write_section("rates", rates_table(runs[runs["part"] == "rates"]), page)
    write_section("controls", controls_table(runs), page)
    if not unseen.empty:
        write_section("unseen claims", claims_table(unseen, "unseen_acc"), page)
        write_section("unseen", accuracy_table(unseen, "unseen_acc"), page)
    write_section("tuned", tuned, page)
    write_section("tuning", tuning, page)
    for part in ("others", "hidden"):
        if part in set(runs["part"]):
            write_section(part, accuracy_table(runs[runs["part"] == part]), page)
