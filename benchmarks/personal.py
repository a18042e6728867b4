"""Part E of docs/results/plan.md: models of clients' own, without and with a joint head.

    python benchmarks/personal.py --out personal --settings digits
    python benchmarks/personal.py --out personal --settings digits pacs --data DIR --weights lite0.safetensors

It is resumable: finished runs are kept, and one that was cut off is resumed. DIR holds the folder ``pacs``; the weights
are those that ``campaign.py weights`` writes. The tables go into docs/results/personal.md, of all runs in the folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaign_tables import compare, holm
from pandas import Series
from timing import write_section

from jdfl_lightning import (
    PACS,
    Algorithm,
    ClusterAvg,
    Clustering,
    DigitsDomains,
    Ditto,
    Experiment,
    FedAvg,
    FedRep,
    Graded,
    LocalBackend,
    VectorBackend,
    spread,
    suite,
)
from jdfl_lightning.config.experiment import Checkpointing

BATCH_NORM = ["backbone.0.1.*", "backbone.1.1.*"]
"""The BatchNorm layers of `digits_net.batch_norm_net`."""


@dataclass(frozen=True)
class Method:
    """A way to get models of clients' own."""

    algorithm: Algorithm = field(default_factory=FedAvg)
    changes: dict[str, Any] = field(default_factory=dict)
    """Other settings of the experiment."""
    supervisions: tuple[str, ...] = ("base", "graded")
    settings: tuple[str, ...] = ("digits", "pacs")


METHODS = {
    "FedAvg": Method(changes={"finetune_epochs": 2}),
    "FedAvg, own scorer": Method(changes={"score": "own"}, supervisions=("graded",)),
    "FedBN": Method(changes={"private": BATCH_NORM, "statistics": "estimated"}, settings=("digits",)),
    "FedPer": Method(changes={"private": ["head.*"]}),
    "FedRep": Method(FedRep(), {"private": ["head.*"]}),
    "Ditto": Method(Ditto(mu=0.1)),
    "ClusterAvg": Method(ClusterAvg(), supervisions=("base",)),
}
SETTINGS = ("digits", "pacs")
NAMES = {"base": "plain", "graded": "JDFL"}


def experiment_of(setting: str, name: str, options: argparse.Namespace) -> Experiment:
    """Return the settings that the runs of a method share."""
    method = METHODS[name]
    shared: dict[str, Any] = {
        "algorithm": method.algorithm,
        "supervision": "base" if method.supervisions == ("base",) else Graded(),
        "num_domains": 4,
        "rounds": options.rounds,
        "epochs": 2,
        "client_fraction": 1.0,
        "select": "last",
        "clustering": Clustering(layers=["*"]),
        "checkpoint": Checkpointing(every=10, keep=1),
        "figures": False,
        "run_dir": str(options.out / f"{setting}-{name.lower().replace(', ', '-').replace(' ', '_')}"),
        "evaluate_every": options.rounds,
    }
    if setting == "digits":
        shared |= {"data": DigitsDomains(size=16, num_clients=10), "backbone": "digits_net.batch_norm_net"}
        shared |= {"backend": LocalBackend(), "lr": 0.05}
    else:
        shared["data"] = PACS(root=str(options.data / "pacs"), num_clients=10, size=128)
        shared["backbone"] = "timm/tf_efficientnet_lite0"
        shared["backbone_args"] = {"weights": str(options.weights), "freeze": True, "hidden": 128}
        shared |= {"backend": VectorBackend() if method.algorithm.allows_stack else LocalBackend(), "lr": 0.03}
    return Experiment(**(shared | method.changes))


def read(folder: Path, setting: str) -> dict[tuple[str, str, str], dict[int, dict[str, float]]]:
    """Return accuracies (%) by method, supervision and model, then by seed: mean, worst and deviation over clients."""
    found: dict[tuple[str, str, str], dict[int, dict[str, float]]] = {}
    for name in METHODS:
        runs = folder / f"{setting}-{name.lower().replace(', ', '-').replace(' ', '_')}"
        for file in sorted(runs.glob("*-seed*/evaluation.json")):
            _, supervision, seed = file.parent.name.split("-")
            for model, over in json.loads(file.read_text())["personal"]["models"].items():
                values = {what: 100 * (over[what] or 0.0) for what in ("mean", "worst", "std")}
                found.setdefault((name, supervision, model), {})[int(seed.removeprefix("seed"))] = values
    return found


def table(folder: Path, setting: str) -> str:
    """Return the accuracies of a setting, then the planned comparisons."""
    found = read(folder, setting)
    lines = [
        "Accuracy (%) on the test images of the client's domain after the last round, over 10 clients; mean and "
        "standard deviation over seeds.",
        "",
        "| method | head | model | seeds | mean over clients | worst client | deviation over clients |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for (name, supervision, model), seeds in found.items():
        cells = []
        for what in ("mean", "worst", "std"):
            over = spread([seeds[seed][what] for seed in sorted(seeds)])
            cells.append(f"{over.mean:.1f}" + ("" if over.std is None else f" ± {over.std:.1f}"))
        lines.append(f"| {name} | {NAMES[supervision]} | {model} | {len(seeds)} | {' | '.join(cells)} |")
    pairs = [((name, "graded", "personal"), (name, "base", "personal")) for name in METHODS]
    pairs += [((name, "graded", "personal"), ("ClusterAvg", "base", "personal")) for name in list(METHODS)[:2]]
    pairs += [((name, "base", "personal"), ("FedAvg", "base", "personal")) for name in list(METHODS)[2:]]
    rows = []
    for ours, base in pairs:
        if ours in found and base in found:
            series = [Series({seed: values["mean"] for seed, values in found[key].items()}) for key in (ours, base)]
            rows.append((ours, base, compare(*series)))
    tested = [row for row in rows if row[2]["seeds"] > 1]
    for row, p in zip(tested, holm([about["p"] for _, _, about in tested]), strict=True):
        row[2]["holm"] = p
    lines += [
        "",
        "| personal, mean over clients | minus | seeds | difference | 95 % interval | p, Holm |",
        "|---|---|---:|---:|---|---:|",
    ]
    for ours, base, about in rows:
        words = [f"{name}, {NAMES[supervision]}" for name, supervision, _ in (ours, base)]
        if about["seeds"] == 0:
            continue
        low, high = about.get("low"), about.get("high")
        interval = "-" if low is None else f"{low:+.2f} to {high:+.2f}"
        p = f"{about['holm']:.3f}" if "holm" in about else "-"
        lines.append(f"| {' | '.join(words)} | {about['seeds']} | {about['mean']:+.2f} | {interval} | {p} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is left, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("personal"))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["digits"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--data", type=Path, help="folder that has pacs/")
    parser.add_argument("--weights", type=Path, help="of EfficientNet-Lite0, as campaign.py writes them")
    parser.add_argument("--dry", action="store_true", help="print the tables and leave the page as it is")
    options = parser.parse_args()
    if "pacs" in options.settings and (options.data is None or options.weights is None):
        parser.error("--settings pacs needs --data and --weights")
    for seed in range(
        options.seeds
    ):  # by seed first: whenever time runs out, the comparison is complete up to some seed
        for setting in options.settings:
            for name in options.methods:
                if setting in METHODS[name].settings:
                    made = experiment_of(setting, name, options)
                    done = suite(made, None, METHODS[name].supervisions, [seed], progress=False)
                    for run, failure in done.failures.items():
                        print(f"{setting}, {name}, {run} failed: {failure}", file=sys.stderr, flush=True)
        print(f"seed {seed} is done", file=sys.stderr, flush=True)
    for setting in SETTINGS:
        if any(options.out.glob(f"{setting}-*")):
            text = table(options.out, setting)
            if options.dry:
                print(text)
            else:
                write_section(setting, text, "results/personal.md")


if __name__ == "__main__":
    main()
