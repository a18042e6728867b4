"""Names of the files in a run folder."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Interval, Len

NETWORK = "network.safetensors"
"""The frozen network of a run whose clients train on its features; all weights of the run share it."""
FEDERATION = "federation.json"
"""The id under which the sites of a federation know the run."""
RUNS = "runs"
"""Where new run folders are made."""
METRICS, CURVES = "metrics.csv", "curves.png"
DATA = "data.json"
EVALUATION, CLIENT_ROWS = "evaluation.json", "clients.csv"
CONFUSION, CONFUSION_FIGURE = "confusion.csv", "confusion.png"
STOPPED = "stopped.json"
"""Why a callback ended the run; a run that reached its last round has no such file."""
DISCOVERY, DISCOVERY_FIGURE, VECTORS = "discovery.json", "discovery.png", "discovery.safetensors"
TARGETS_FIGURE = "targets.png"
"""How a table that the server learned changed over the rounds."""
ALONE = "-discovery"
"""Suffix of the folder name of a discovery alone."""
DIAGNOSIS, DIAGNOSIS_FIGURE = "diagnosis.csv", "diagnosis.png"
DOMAIN_PREFIX, UNSEEN_PREFIX = "test/acc/", "unseen/acc/"
"""Prefixes of the columns of domain accuracies in ``metrics.csv``: of clients' domains and of unseen ones."""
Selection = Literal["val", "last", "test"]
"""How the round of a run is picked: by validation images, the last one, or by test images (the paper)."""
Which = Literal["best", "last"]
FigureFormat = Literal["pdf", "svg"]
"""Formats of pictures besides PNG."""
Count = Annotated[int, Interval(ge=0, lt=2**63)]
Text = Annotated[str, Len(0, 10_000)]
