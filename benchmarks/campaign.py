"""Parts B, C and D of docs/results/plan.md: joint heads on pretrained features.

    python benchmarks/campaign.py weights lite0.safetensors
    python benchmarks/campaign.py run --data DIR --weights lite0.safetensors --out campaign
    python benchmarks/campaign.py analyse --out campaign

`run` is resumable: finished runs are kept, and one that was cut off is resumed. DIR holds the folders ``pacs`` and
``office_caltech_10``. `analyse` writes ``runs.csv``, the tables and the figure into docs/results/.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from jdfl_lightning import PACS, Experiment, FedAvg, Graded, OfficeCaltech, VectorBackend, reuse_memory, suite
from jdfl_lightning.config.experiment import Checkpointing
from jdfl_lightning.data import DomainDataModule

sys.path.append(str(Path(__file__).parents[1] / "tests"))

RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
SUPERVISIONS = ("base", "hard", "graded", "random", "uniform", "em", "online")
OTHERS = ("SCAFFOLD", "FedDyn", "FedDC", "FedProc")
SETTINGS: dict[str, dict[str, Any]] = {
    "pacs_a": {"rounds": 30, "epochs": 1, "client_fraction": 1.0, "num_domains": 4},
    "pacs_b": {"rounds": 15, "epochs": 5, "client_fraction": 0.5, "num_domains": 4},
    "office": {"rounds": 15, "epochs": 5, "client_fraction": 1.0, "num_domains": 4},
}


@dataclass(frozen=True)
class Study:
    """Some runs that share their settings but for algorithm, supervision and seed."""

    part: str
    setting: str
    supervisions: tuple[str, ...] = SUPERVISIONS
    algorithms: tuple[str, ...] = ("FedAvg",)
    seeds: range = range(20)
    rate: float | None = None
    """Learning rate; None for the one that part D's rates decide."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Other settings of the experiment."""
    unseen: str | None = None
    """A domain that is left out."""

    def missing(self, known: pd.DataFrame, seed: int) -> Iterator[tuple[str, list[str]]]:
        """Yield the algorithms, each with the supervisions, whose runs of a seed a table of runs does not have."""
        _, _, *changes = self.folder.split("-", 2)
        own = known[(known["part"] == self.part) & (known["setting"] == self.setting) & (known["seed"] == seed)]
        own = own[own["unseen"] == (self.unseen or "")]
        if self.rate is not None:
            own = own[own["lr"] == self.rate]
        elif self.unseen is None:
            own = own[own["change"] == "".join(changes)]
        for algorithm in self.algorithms:
            done = set(own[own["algorithm"] == algorithm.lower()]["supervision"])
            if wanted := [name for name in self.supervisions if name not in done]:
                yield algorithm, wanted

    @property
    def folder(self) -> str:
        """Its folder within that of the campaign."""
        words = [self.part, self.setting, *([] if self.rate is None else [f"lr{self.rate:g}"])]
        words += [f"{name}-{str(value).replace('/', '_')}" for name, value in self.changes.items()]
        return "-".join([*words, *([] if self.unseen is None else [self.unseen])])


def studies() -> Iterator[Study]:
    """Yield all studies in the order of the plan."""
    for rate in RATES:
        yield Study("rates", "pacs_a", seeds=range(5), rate=rate)
    yield from (Study("fedavg", setting) for setting in SETTINGS)
    for setting in ("pacs_a", "office"):
        yield Study("controls", setting, ("base",), changes={"head_lr": 0.25})
        yield Study("controls", setting, ("uniform", "random"), changes={"head_init": "tile"})
    names = {"pacs_a": PACS.domain_names, "office": OfficeCaltech.domain_names}
    for setting, domains in names.items():
        for unseen in domains:
            yield Study("unseen", setting, algorithms=("FedAvg", "SCAFFOLD"), seeds=range(10), unseen=unseen)
    yield from (Study("others", setting, algorithms=OTHERS) for setting in SETTINGS)
    yield from (Study("hidden", setting, changes={"hidden": 128}) for setting in SETTINGS)
    for rate in RATES:
        for setting in ("pacs_a", "pacs_b"):
            yield Study("tuning", setting, ("base", "graded"), ("FedDyn", "FedDC"), range(5), rate)


def tuned_studies(folder: Path) -> Iterator[Study]:
    """Yield each study of part `tuning` at the rate that its validation images pick, with seeds of its own."""
    from campaign_tables import all_runs, best_rates

    for (setting, algorithm, supervision), rate in best_rates(all_runs(folder)).items():
        name = {"feddyn": "FedDyn", "feddc": "FedDC"}[algorithm]
        yield Study("tuned", setting, (supervision,), (name,), range(20, 40), rate)


def data_of(study: Study, root: Path) -> DomainDataModule:
    """Return the images of a study, with a validation part."""
    options: dict[str, Any] = {"size": 128, "normalize": None, "val_fraction": 0.1, "unseen": study.unseen}
    if study.setting == "office":
        clients = 4 if study.unseen is None else 3
        return OfficeCaltech(root=str(root / "office_caltech_10"), num_clients=clients, test_fraction=0.2, **options)
    return PACS(root=str(root / "pacs"), num_clients=10, test_fraction=0.1, **options)


def experiment_of(study: Study, data: DomainDataModule, weights: Path, rate: float, folder: Path) -> Experiment:
    """Return the settings that the runs of a study share."""
    settings, changes = dict(SETTINGS[study.setting]), dict(study.changes)
    backbone = {"weights": str(weights), "freeze": True, "hidden": changes.pop("hidden", None)}
    if study.unseen is not None:
        settings["num_domains"] = 3
    return Experiment(
        data=data,
        backbone="timm/tf_efficientnet_lite0",
        backbone_args={name: value for name, value in backbone.items() if value is not None},
        algorithm=FedAvg(),
        supervision=Graded(),
        lr=study.rate or rate,
        backend=VectorBackend(),
        checkpoint=Checkpointing(every=1000, keep=1),
        figures=False,
        run_dir=str(folder / study.folder),
        **settings,
        **changes,
    )


def best_rate(folder: Path) -> float:
    """Return the rate at which base has the highest mean validation accuracy in part D."""
    from campaign_tables import all_runs

    runs = all_runs(folder)
    base = runs[(runs["part"] == "rates") & (runs["supervision"] == "base")]
    if base.empty:
        raise SystemExit("Expected the runs of part D's rates first: --parts rates.")
    return float(base.groupby("lr")["val"].mean().idxmax())


def run(folder: Path, root: Path, weights: Path, parts: list[str], seeds: int) -> None:
    """Run, or resume, the studies of some parts, a seed of all settings of a part after the other."""
    from campaign_tables import published

    folder.mkdir(parents=True, exist_ok=True)
    reuse_memory()
    known = published()
    wanted = [study for study in studies() if study.part in parts]
    for part in parts:
        rate = 0.0 if part == "rates" else best_rate(folder)
        mine = [study for study in wanted if study.part == part] or list(tuned_studies(folder))
        shared = {study.folder: data_of(study, root) for study in mine}
        for seed in sorted({seed for study in mine for seed in study.seeds[:seeds]}):
            for study in mine:
                for algorithm, supervisions in study.missing(known, seed) if seed in study.seeds else ():
                    made = experiment_of(study, shared[study.folder], weights, rate, folder)
                    done = suite(made, [algorithm], supervisions, [seed], progress=False)
                    for name, failure in done.failures.items():
                        print(f"{study.folder}/{name} failed: {failure}", flush=True)
            print(f"{part}: seed {seed} is done", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    written = commands.add_parser("weights", help="write the weights of the package under timm's names")
    written.add_argument("file", type=Path)
    running = commands.add_parser("run")
    running.add_argument("--data", type=Path, required=True)
    running.add_argument("--weights", type=Path, required=True)
    parts = [*dict.fromkeys(study.part for study in studies()), "tuned"]
    running.add_argument("--parts", nargs="+", choices=parts, default=parts)
    running.add_argument("--seeds", type=int, default=20, help="at most this many of the plan's seeds")
    analysing = commands.add_parser("analyse")
    for command in (running, analysing):
        command.add_argument("--out", type=Path, default=Path("campaign"))
    options = parser.parse_args()
    if options.command == "weights":
        from lite0 import write_lite0

        write_lite0(options.file)
    elif options.command == "run":
        run(options.out, options.data, options.weights, options.parts, options.seeds)
    else:
        from campaign_tables import write_page

        write_page(options.out)


if __name__ == "__main__":
    main()
