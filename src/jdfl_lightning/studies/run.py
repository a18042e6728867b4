"""`Run` and `Discovery`: what a run left, for Python and notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdfl_lightning.core.errors import InputError
from jdfl_lightning.joint import Score
from jdfl_lightning.report.discovery import draw_discovery
from jdfl_lightning.report.run import Drawing, draw_curves
from jdfl_lightning.storage.discoveries import read_discovery
from jdfl_lightning.storage.folder import SavedRun, read_run
from jdfl_lightning.storage.names import Which
from jdfl_lightning.studies.inference import predict
from jdfl_lightning.studies.model import ManyImages, TrainedModel, load_to_use

if TYPE_CHECKING:
    import pandas as pd


class Discovery(dict[str, Any]):
    """The result of Phase 1: the content of ``discovery.json``, with tables and a figure.

    Args:
        record: the content; `GroupDomains.record` gives it without a federation.
        folder: the folder it was read from; `Experiment.discovery` takes it.
    """

    def __init__(self, record: Mapping[str, Any], folder: Path | None = None) -> None:
        super().__init__(record)
        self.folder = folder

    @classmethod
    def read(cls, folder: str | Path) -> Discovery:
        """Read the discovery of a run, or of `discover`.

        Args:
            folder: the folder, which has a ``discovery.json``.
        """
        return cls(read_discovery(Path(folder)), Path(folder))

    def __repr__(self) -> str:
        """Show the result in one line."""
        ari = f", ARI {self.ari:.2f}" if self.ari is not None else ""
        return f"Discovery({self.folder}, M = {self.num_domains}{ari})"

    def _repr_html_(self) -> str:
        """Show the figure in a notebook."""
        return self.plot().as_html("Phase 1")

    @property
    def num_domains(self) -> int:
        """M, the number of pseudo-domains."""
        return int(self["num_domains"])

    @property
    def ari(self) -> float | None:
        """Agreement with the true domains: 1 for the same groups, about 0 by chance; None if they are not known."""
        return self.get("ari")

    @property
    def clients(self) -> pd.DataFrame:
        """The pseudo-domain of each client and, where it is known, its true domain."""
        from jdfl_lightning.report.frames import clients_frame

        return clients_frame(self)

    @property
    def choice(self) -> pd.DataFrame:
        """Inertia and silhouette for each number M that was tried."""
        from jdfl_lightning.report.frames import choice_frame

        return choice_frame(self)

    def graded_weights(self, alpha: float | None = None, tau: float = 0.1) -> pd.DataFrame:
        """Return the weights that graded targets give to each pseudo-domain, a row for a client's own one.

        Args:
            alpha: mass on the own pseudo-domain; the paper's if not given.
            tau: temperature over the similarities.
        """
        from jdfl_lightning.report.frames import graded_frame

        return graded_frame(self, alpha, tau)

    def plot(self) -> Drawing:
        """Draw how M was chosen, how similar the pseudo-domains are, and where the clients lie."""
        return draw_discovery(self)


@dataclass(frozen=True, repr=False)
class Run(SavedRun):
    """A run: what `fit` returns, or what is in a run folder (`Run.read`)."""

    discovery: Discovery | None
    """The pseudo-domains; None for the baseline."""

    @classmethod
    def read(cls, folder: str | Path) -> Run:
        """Read a run folder. Nothing in it is executed; only `model` and `predict` import the classes that it names.

        Args:
            folder: the run folder.
        """
        found = read_run(Path(folder))
        discovery = None if found.discovery is None else Discovery.read(folder)
        return cls(found.folder, found.config, found.rows, discovery, found.stop)

    @property
    def metrics(self) -> pd.DataFrame:
        """``metrics.csv``: a row for each round, a column for each metric."""
        from jdfl_lightning.report.frames import frame

        return frame([row | {"round": int(row["round"])} for row in self.rows], "round")

    def model(self, which: Which | None = None, preprocess: bool = False, trust: bool = False) -> TrainedModel:
        """Return the trained network in eval mode: images -> joint logits (B, M*C).

        Args:
            which: the weights, ``"best"`` or ``"last"``; the best if not given, or the last if no best is kept.
            preprocess: whether the network takes files, images of Pillow, and uint8 arrays or tensors, and resizes and
                normalises them itself; else it takes float (B, 3, size, size), normalised as in training: `to_input`.
            trust: import whatever classes the run folder names, even if you did not make it here.
        """
        if which not in (None, "best", "last"):
            raise InputError(f"Expected argument `which` to be 'best' or 'last' but got {which!r}.")
        return load_to_use(self.folder, which, trust, preprocess)

    def predict(
        self, images: ManyImages, which: Which | None = None, score: Score | None = None, trust: bool = False
    ) -> pd.DataFrame:
        """Predict the classes of images; see `predict`."""
        return predict(self, images, which, score, trust)

    def plot(self) -> Drawing:
        """Draw accuracy (overall and for each domain) and training loss against the round."""
        return draw_curves(self)

    def _repr_html_(self) -> str:
        """Show the accuracies of the saved weights and the curves in a notebook."""
        from jdfl_lightning.report.frames import accuracy_html

        table = accuracy_html(self.ends)
        return f"<p>Run <code>{escape(str(self.folder))}</code></p>{table}{self.plot().as_html('curves')}"
