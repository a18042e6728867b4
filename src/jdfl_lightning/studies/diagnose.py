"""How reliable clustering is on a data set: the paper's sweep over E_0, batch size, layers and seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from jdfl_lightning.client.features import open_workspace
from jdfl_lightning.clustering.clusters import cluster
from jdfl_lightning.clustering.sketch import sketch
from jdfl_lightning.clustering.updates import Updates, unit
from jdfl_lightning.config import Experiment
from jdfl_lightning.core.errors import InputError, Interrupted, last_line, require
from jdfl_lightning.core.messages import DISCOVERY_ROUND, FitFailure, FitResult, FitTask
from jdfl_lightning.core.system import after_current_client
from jdfl_lightning.core.tensors import Record, flatten
from jdfl_lightning.models import LAYER_SUBSETS, select_parameters
from jdfl_lightning.report.details import draw_diagnosis
from jdfl_lightning.report.run import Drawing, frame
from jdfl_lightning.server.phase1 import prepare, require_discovery
from jdfl_lightning.server.resume import find_run
from jdfl_lightning.server.session import open_run
from jdfl_lightning.storage.checkpoint import ClientStates
from jdfl_lightning.storage.details import Finding, read_findings, write_findings
from jdfl_lightning.storage.folder import save_figure
from jdfl_lightning.storage.names import DIAGNOSIS_FIGURE
from jdfl_lightning.ui.display import Display, progress_display

if TYPE_CHECKING:
    import pandas as pd

WIDEST = "C"
"""The subset of layers that clients send; it contains the others."""


@dataclass(frozen=True)
class Sweep:
    """The cases to try: every batch size with every seed; one training gives all E_0 and subsets of layers."""

    seeds: Sequence[int] = (0, 1, 2)
    """Seeds of initialisation, split and shuffling."""
    batch_sizes: Sequence[int] = (16, 32, 64)
    """Images in a local batch."""
    epochs: int = 5
    """E_0 is tried from 1 to this."""

    def __post_init__(self) -> None:
        for flag, values in (("--seeds", self.seeds), ("--batch_sizes", self.batch_sizes)):
            require(len(values) > 0 and len(set(values)) == len(values), flag, "different numbers", list(values))
        require(min(self.seeds) >= 0, "--seeds", "0 or more", list(self.seeds))
        require(min(self.batch_sizes) > 0, "--batch_sizes", "positive", list(self.batch_sizes))
        require(self.epochs > 0, "--max_epochs", "positive", self.epochs)


@dataclass(frozen=True)
class Diagnosis:
    """The folder of a finished sweep."""

    folder: Path
    """It has ``diagnosis.csv`` and a figure."""

    @property
    def findings(self) -> pd.DataFrame:
        """``diagnosis.csv``: a row for each seed, batch size, E_0 and subset of layers."""
        return frame([asdict(finding) for finding in read_findings(self.folder)])

    def plot(self) -> Drawing:
        """Draw ARI, and how often the right M was found, as heat maps."""
        return draw_diagnosis(self.folder)

    def _repr_html_(self) -> str:
        """Show the heat maps in a notebook."""
        return self.plot().as_html("diagnosis")


def diagnose(experiment: Experiment, sweep: Sweep | None = None, progress: bool | Display = True) -> Diagnosis:
    """Try Phase 1 over E_0, batch sizes, layers and seeds, or resume that, and leave a folder with ``diagnosis.csv``.

    Args:
        experiment: data, network and learning rate; with ``clustering.sketch_dim`` sketches are tried too.
        sweep: what to try; `Sweep()` if not given.
        progress: whether progress is shown, as in `fit`.

    Returns:
        How well the clusters agree with the true domains, and how often the right M was found.
    """
    with progress_display(progress) as display:
        return Diagnosis(_sweep(experiment, sweep or Sweep(), display))


def _sweep(experiment: Experiment, sweep: Sweep, display: Display) -> Path:
    """Run what is left of the sweep and return its folder."""
    require_discovery(experiment)
    earlier = find_run(experiment, diagnosis=True)
    prepare(experiment, display)
    findings = [] if earlier is None else read_findings(earlier)
    done = {(finding.seed, finding.batch_size, finding.epochs) for finding in findings}
    cases = [(seed, batch_size) for seed in sweep.seeds for batch_size in sweep.batch_sizes]
    with open_run(experiment, f"{experiment.name}-diagnosis", earlier) as folder:
        display.say(f"folder: {folder}")
        write_findings(folder, findings)  # also marks the folder as a sweep
        with after_current_client(display.say) as check:
            try:
                for number, (seed, batch_size) in enumerate(cases, start=1):
                    if (seed, batch_size, sweep.epochs) not in done:
                        options = replace(
                            experiment.clustering, epochs=sweep.epochs, batch_size=batch_size, layers=WIDEST
                        )
                        case = replace(experiment, seed_everything=seed, clustering=options)
                        name = f"case {number}/{len(cases)}: seed {seed}, batch {batch_size}"
                        kept = [f for f in findings if (f.seed, f.batch_size) != (seed, batch_size)]
                        findings = kept + list(find(case, folder, name, display, check))
                        write_findings(folder, findings)
            except KeyboardInterrupt:
                again = f"jdfl-lightning diagnose --resume {folder}, with --seeds and so on as before"
                raise Interrupted(again) from None
        save_figure(draw_diagnosis(folder), folder / DIAGNOSIS_FIGURE, experiment.figure_formats)
    return folder


def find(
    case: Experiment, folder: Path, name: str = "", display: Display | None = None, check: Callable[[], object] = int
) -> Iterator[Finding]:
    """Train every client once; yield a finding for each E_0 and each subset of layers.

    Args:
        case: its seed, its clustering's batch size and number of epochs; the layers are `WIDEST`.
        folder: folder for the backend's files.
        name: name in the display.
        display: where progress is shown.
        check: called wherever the sweep can be interrupted.
    """
    display = display or Display()
    data, seed = case.data, case.seed_everything
    data.deal(seed)
    workspace = open_workspace(case)
    require(not case.private, "--private", "left out, as all layers are compared,", case.private)
    weights, buffers = workspace.initial(1)
    module = workspace.module(weights, buffers)
    names = {layers: select_parameters(module, layers) for layers in LAYER_SUBSETS}
    tasks = [
        FitTask(client, DISCOVERY_ROUND, seed, weights, buffers, every_epoch=True) for client in range(data.num_clients)
    ]
    with case.backend.open(workspace.experiment, ClientStates(folder / "clients")) as runner:
        sent: list[Record] = []
        display.step(name, 0, len(tasks))
        for result in runner.fit(tasks):
            sent.append(_update(result))
            display.step(name, len(sent), len(tasks))
            check()
    truth = data.partition.client_domains
    for epochs in range(1, case.clustering.epochs + 1):
        for layers, chosen in names.items():
            vectors = torch.stack([unit(flatten({n: record[str(epochs)][n] for n in chosen})) for record in sent])
            yield _judge(case, vectors, truth, epochs, layers)


def _update(result: FitResult | FitFailure) -> Record:
    if isinstance(result, FitFailure):
        raise InputError(
            f"Expected every client to answer but client {result.client} failed: {last_line(result.reason)}"
        ) from RuntimeError(result.reason)
    if not all(torch.isfinite(tensor).all() for group in result.upload.values() for tensor in group.values()):
        raise InputError(f"Expected finite updates but client {result.client}'s is not: lower --lr.")
    return result.upload


def _judge(case: Experiment, vectors: Tensor, truth: Sequence[int], epochs: int, layers: str) -> Finding:
    options, seed = case.clustering, case.seed_everything

    def look(rows: Tensor) -> tuple[float, int | None, int | None]:
        updates = Updates(list(range(len(rows))), rows)
        found = cluster(updates, len(set(truth)), options.criterion, options.max_domains, seed)
        ari = float(adjusted_rand_score(truth, list(found.assignments.values())))
        return ari, found.picks["elbow"], found.picks["silhouette"]

    size = options.batch_size or case.batch_size
    looked_at = len(vectors), len(set(truth)), seed, size, epochs, layers, vectors.shape[1]
    if options.sketch_dim is None:
        return Finding(*looked_at, *look(vectors))
    short = torch.stack([unit(sketch(vector, options.sketch_dim, seed)) for vector in vectors])
    return Finding(*looked_at, *look(vectors), options.sketch_dim, *look(short))
