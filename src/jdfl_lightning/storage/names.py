"""Names of the files in a run folder."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Interval, Len

NETWORK = "network.safetensors"
"""The frozen network of a run whose clients train on its features; all weights of the run share it."""
RUNS = "runs"
"""Where new run folders are made."""
METRICS, CURVES = "metrics.csv", "curves.png"
STOPPED = "stopped.json"
"""Why a callback ended the run; a run that reached its last round has no such file."""
DISCOVERY, DISCOVERY_FIGURE, VECTORS = "discovery.json", "discovery.png", "discovery.safetensors"
ALONE = "-discovery"
"""Suffix of the folder name of a discovery alone."""
DIAGNOSIS, DIAGNOSIS_FIGURE = "diagnosis.csv", "diagnosis.png"
DOMAIN_PREFIX = "test/acc/"
"""Prefix of the columns of domain accuracies in ``metrics.csv``."""
Which = Literal["best", "last"]
Count = Annotated[int, Interval(ge=0, lt=2**63)]
Text = Annotated[str, Len(0, 10_000)]
