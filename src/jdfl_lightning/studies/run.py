"""`fit` and `discover`, as Python users and the commands call them, and `Run`: what a run left, for notebooks too."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from jdfl_lightning.config import Experiment
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.joint import Score
from jdfl_lightning.report.discovery import Discovery
from jdfl_lightning.report.run import Drawing, accuracy_html, draw_curves, frame
from jdfl_lightning.server import run as server
from jdfl_lightning.storage.folder import SavedRun, read_run
from jdfl_lightning.storage.names import Which
from jdfl_lightning.studies.inference import predict
from jdfl_lightning.studies.model import ManyImages, TrainedModel, load_to_use
from jdfl_lightning.ui.display import Display, progress_display

if TYPE_CHECKING:
    import pandas as pd


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
        table = accuracy_html(self.ends)
        return f"<p>Run <code>{escape(str(self.folder))}</code></p>{table}{self.plot().as_html('curves')}"


def fit(experiment: Experiment, progress: bool | Display = True) -> Run:
    """Run Joint Domain-Class Federated Learning, or resume a run, and leave a run folder.

    Args:
        experiment: the settings.
        progress: whether progress is shown: live on a terminal or in a notebook, as plain lines elsewhere. Or a
            display of your own.

    Returns:
        The finished run, read back from its folder.
    """
    with progress_display(progress) as display:
        return Run.read(server.fit(experiment, display).folder)


def discover(experiment: Experiment, progress: bool | Display = True) -> Discovery:
    """Run Phase 1 alone and leave a folder that a run can reuse, by its setting `discovery`.

    Args:
        experiment: the settings; those of the rounds do not matter.
        progress: whether progress is shown, as in `fit`.

    Returns:
        The pseudo-domains and their folder.
    """
    with progress_display(progress) as display:
        return Discovery.read(server.discover(experiment, display))
