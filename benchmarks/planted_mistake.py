"""Put one client's pseudo-domain wrong, and see which supervisions recover; the plan is in docs/results/planted.md.

    python benchmarks/planted_mistake.py --out runs/planted

Finished runs are kept, so that the same command continues. Tables and a figure go into docs/results/.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from timing import DOCS, write_section

from jdfl_lightning import EM, DigitsDomains, Experiment, LocalBackend, RunCallback, paired_difference, suite
from jdfl_lightning.callbacks import RoundReport
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.clustering.clusters import PseudoDomains, cluster
from jdfl_lightning.core.messages import SUPERVISION
from jdfl_lightning.data import DomainDataModule
from jdfl_lightning.server.run import discover
from jdfl_lightning.storage.discoveries import load_discovery, read_discovery, save_discovery
from jdfl_lightning.storage.folder import read_run
from jdfl_lightning.storage.names import DISCOVERY
from jdfl_lightning.storage.trust import CONFIG
from jdfl_lightning.studies.suite import DISCOVERIES
from jdfl_lightning.supervision import RoundInfo, Supervision

sys.path.append(str(Path(__file__).parent))  # of the network, which settings name
SEEDS = (0, 1, 2, 3, 4)
ROUNDS, LAST = 15, 5
MASSES = "masses.csv"
FULL = EM(lam=1.0)
PLANTED = ("hard", "graded", "em", "em, lam 1")
OTHERS = ("base", "random", "uniform", "online")
COLOURS = {"hard": "#e69f00", "graded": "#0072b2", "em": "#d55e00", "em, lam 1": "#882255"}


class Watch(RunCallback):
    """Writes, after every round, the mean target of every client's training images under the global model."""

    def run_started(self, folder: Path, experiment: Experiment) -> None:
        """Begin a new table."""
        self.file, self.experiment, self.workspace = folder / MASSES, experiment, Workspace(experiment)
        self.rows: list[list[float]] = []

    def discovered(self, domains: PseudoDomains | None) -> None:
        """Note the pseudo-domains."""
        self.domains = domains

    def round_evaluated(self, report: RoundReport) -> None:
        """Ask the supervision for the targets of the next round."""
        state, domains, data = report.state, self.domains, self.experiment.data
        if state is None or domains is None:
            return
        supervision: Supervision = self.experiment.supervision
        info = RoundInfo(report.round + 1, self.experiment.rounds, domains.centroids)
        sent = supervision.broadcast(state.learned.get(SUPERVISION, {}), info)
        module = self.workspace.module(state.weights, state.buffers).eval()
        for client, own in domains.assignments.items():
            rule = supervision.rule(sent, own)
            sums, count = torch.zeros(domains.num_domains), 0
            for images, labels, pseudo in data.client_loader(client, own, 256, torch.Generator(), augment=False):
                with torch.no_grad():
                    logits = module(images)
                sums += rule(pseudo, torch.Generator(), logits, labels).sum(dim=0)
                count += len(labels)
            self.rows.append([report.round, client, *(sums / count).tolist()])
        with self.file.open("w", newline="") as out:
            csv.writer(out).writerows(self.rows)


def settings(folder: Path, **changes: Any) -> Experiment:
    """Return the settings of the plan."""
    return Experiment(
        data=DigitsDomains(size=12, num_clients=8, val_fraction=0.125),
        backbone="digits_net.digits_net",
        num_domains=4,
        client_fraction=1.0,
        rounds=ROUNDS,
        epochs=3,
        lr=0.1,
        backend=LocalBackend(),
        run_dir=str(folder),
        **changes,
    )


def moved(data: DomainDataModule, seed: int) -> tuple[int, int]:
    """Return the client that is moved, and the client of the other domain whose update it gets."""
    names, truth = data.domain_names, data.true_domains
    assert truth is not None
    return truth.index(names[seed % 4]), truth.index(names[(seed + 2) % 4])


def assign(folder: Path, found: Path, seed: int, mistake: bool) -> None:
    """Write a discovery in which every client has the update of its domain's first client; one of them has another's.

    Args:
        folder: where the suite looks for it.
        found: a discovery of the same seed.
        seed: the seed.
        mistake: whether one client is moved.
    """
    if (folder / DISCOVERY).exists():
        return
    data = settings(folder).data
    data.deal(seed)
    known, truth = load_discovery(found, data.fingerprint(), data.num_clients), data.true_domains
    assert known is not None
    assert truth is not None
    source = {client: truth.index(truth[client]) for client in known[0].clients}
    if mistake:
        client, other = moved(data, seed)
        source[client] = other
    updates = replace(known[0], vectors=known[0].vectors[list(source.values())])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_bytes((found / CONFIG).read_bytes())
    save_discovery(folder, updates, cluster(updates, 4, "elbow", 4, seed), truth, data.fingerprint())


def train(out: Path) -> None:
    """Run all that is missing, seed by seed; first what the planted mistake needs."""
    for seed in SEEDS:
        found = out / "found" / f"seed{seed}"
        if not (found / DISCOVERY).exists():
            discover(settings(found, seed_everything=seed, supervision="hard"))
        for name in ("clean", "planted", "clean-full", "planted-full"):
            assign(out / name / DISCOVERIES / f"seed{seed}", found, seed, name.startswith("planted"))
            kinds: list[str | Supervision] = [FULL] if name.endswith("full") else ["hard", "graded", "em"]
            run_all(out / name, kinds, seed)
    for seed in SEEDS:
        run_all(out / "clean", OTHERS, seed)


def run_all(folder: Path, supervisions: Sequence[str | Supervision], seed: int) -> None:
    """Run some supervisions, unless they are finished."""
    done = suite(settings(folder, callbacks=[Watch()]), supervisions=supervisions, seeds=[seed], progress=False)
    if done.failures:
        raise SystemExit(str(done.failures))
    print(f"seed {seed}: {folder.name}, {len(supervisions)} runs", flush=True)


def folder_of(out: Path, which: str, supervision: str, seed: int) -> Path:
    """Return the folder of a run: ``which`` is clean or planted."""
    full = supervision == "em, lam 1"
    return out / (f"{which}-full" if full else which) / f"fedavg-{'em' if full else supervision}-seed{seed}"


def right_and_wrong(folder: Path, client: int) -> tuple[int, int]:
    """Return the pseudo-domain of the other client of a client's true domain, and its own, wrong one."""
    found = read_discovery(folder)
    truth, assigned = found["true_domains"], found["assignments"]
    others = [assigned[other] for other in truth if truth[other] == truth[str(client)] and other != str(client)]
    return int(others[0]), int(assigned[str(client)])


def masses(folder: Path, client: int) -> tuple[list[float], list[float]]:
    """Return, for every round, the mass on the right and on the wrong pseudo-domain of a moved client."""
    right, wrong = right_and_wrong(folder, client)
    with (folder / MASSES).open(newline="") as file:
        rows = [[float(cell) for cell in row] for row in csv.reader(file)]
    own = [row[2:] for row in rows if row[1] == client]
    return [row[right] for row in own], [row[wrong] for row in own]


def ahead_since(right: Sequence[float], wrong: Sequence[float]) -> int | None:
    """Return the first round after which the right one stays ahead; None if it is not ahead at the end."""
    behind = [number for number, pair in enumerate(zip(right, wrong, strict=True), start=1) if pair[0] <= pair[1]]
    last = max(behind, default=0)
    return None if last == len(right) else last + 1


def domain_accuracy(folder: Path, domain: str) -> float:
    """Return the accuracy (%) on a domain's held-out images, the mean of the last rounds."""
    return 100 * statistics.mean(row[f"test/acc/{domain}"] for row in read_run(folder).rows[-LAST:])


def interval(values: Mapping[int, float], base: Mapping[int, float]) -> str:
    """Return a paired difference with its interval."""
    found = paired_difference(values, base)
    assert found is not None
    if found.low is None or found.high is None:
        return f"{found.mean:+.1f}"
    return f"{found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


def around(values: Mapping[int, float]) -> str:
    """Return mean and standard deviation."""
    return f"{statistics.mean(values.values()):.1f} ± {statistics.stdev(values.values()):.1f}"


def table_of_mistake(out: Path) -> str:
    """Return the tables of masses and accuracies."""
    data = settings(out).data
    clients, domains = {}, {}
    for seed in SEEDS:
        data.deal(seed)
        clients[seed] = moved(data, seed)[0]
        domains[seed] = data.domain_names[seed % 4]
    lines = [
        "| | mass on the right, wrong pseudo-domain after the last round, seeds 0 to 4 | right ahead since round |",
        "|---|---|---|",
    ]
    for name in PLANTED:
        ends, since = [], []
        for seed in SEEDS:
            right, wrong = masses(folder_of(out, "planted", name, seed), clients[seed])
            ends.append(f"{right[-1]:.2f}, {wrong[-1]:.2f}")
            since.append(str(ahead_since(right, wrong) or "never"))
        lines.append(f"| {name} | {'; '.join(ends)} | {', '.join(since)} |")
    accuracy: dict[str, dict[str, dict[int, float]]] = {
        which: {
            name: {seed: domain_accuracy(folder_of(out, which, name, seed), domains[seed]) for seed in SEEDS}
            for name in PLANTED
        }
        for which in ("clean", "planted")
    }
    planted, clean = accuracy["planted"], accuracy["clean"]
    lines += [
        "",
        "Accuracy (%) on the moved client's domain, mean of the last 5 rounds; differences are paired, 95 % intervals:",
        "",
        "| | without the mistake | with it | damage | with it, minus graded | with it, minus hard |",
        "|---|---|---|---|---|---|",
    ]
    for name in PLANTED:
        cells = [around(clean[name]), around(planted[name]), interval(clean[name], planted[name])]
        cells += ["-" if name == other else interval(planted[name], planted[other]) for other in ("graded", "hard")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    draw(out, clients, domains)
    return "\n".join([*lines, "", "![masses and accuracies](planted.png)"])


def draw(out: Path, clients: Mapping[int, int], domains: Mapping[int, str]) -> None:
    """Draw masses and accuracies over the rounds."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    rounds = range(1, ROUNDS + 1)
    for name in PLANTED:
        found = [masses(folder_of(out, "planted", name, seed), clients[seed]) for seed in SEEDS]
        for place, style in ((0, "-"), (1, ":")):
            each = torch.tensor([pair[place] for pair in found])
            left.plot(rounds, each.mean(dim=0), style, color=COLOURS[name], lw=2, label=name if place == 0 else None)
            if name.startswith("em"):
                left.fill_between(rounds, each.amin(dim=0), each.amax(dim=0), color=COLOURS[name], alpha=0.10, lw=0)
        for which, style in (("planted", "-"), ("clean", "--")):
            runs = [read_run(folder_of(out, which, name, seed)).rows for seed in SEEDS]
            curves = [
                [100 * row[f"test/acc/{domains[seed]}"] for row in rows] for seed, rows in zip(SEEDS, runs, strict=True)
            ]
            mean = torch.tensor(curves).mean(dim=0)
            right.plot(rounds, mean, style, color=COLOURS[name], lw=1.6, label=name if which == "planted" else None)
    left.plot([], [], "-", color="grey", label="on the right pseudo-domain")
    left.plot([], [], ":", color="grey", label="on the wrong one")
    right.plot([], [], "-", color="grey", label="with the mistake")
    right.plot([], [], "--", color="grey", label="without it")
    left.set(xlabel="round", ylabel="mean target mass", ylim=(-0.02, 1.02), xticks=range(0, ROUNDS + 1, 5))
    left.set_title("targets of the moved client; mean and range of 5 seeds", loc="left", fontsize=10)
    right.set(xlabel="round", ylabel="accuracy (%)", xticks=range(0, ROUNDS + 1, 5))
    right.set_title("held-out images of its true domain; mean of 5 seeds", loc="left", fontsize=10)
    for axes in (left, right):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "results" / "planted.png", dpi=120)


def table_of_supervisions(out: Path) -> str:
    """Return the accuracy of all supervisions without the mistake, in the round that validation images pick."""
    names = ("base", "hard", "graded", "random", "uniform", "em", "em, lam 1", "online")
    rows = {name: {seed: read_run(folder_of(out, "clean", name, seed)).best for seed in SEEDS} for name in names}

    def of(name: str, column: str) -> dict[int, float]:
        return {seed: 100 * row[column] for seed, row in rows[name].items()}

    lines = ["| | accuracy | worst domain | minus base | minus graded |", "|---|---|---|---|---|"]
    for name in names:
        own = of(name, "test/acc")
        cells = ["-" if name == other else interval(own, of(other, "test/acc")) for other in ("base", "graded")]
        lines.append(f"| {name} | {around(own)} | {around(of(name, 'test/acc_worst'))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Train, then write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/planted"))
    out = parser.parse_args().out
    train(out)
    write_section("planted", table_of_mistake(out), "results/planted.md")
    write_section("supervisions", table_of_supervisions(out), "results/planted.md")


if __name__ == "__main__":
    main()
