"""Run folders written by hand, with chosen numbers and without any training."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jdfl_lightning.config import as_dict
from jdfl_lightning.storage.metrics import write_metrics
from jdfl_lightning.supervision import short_names, supervision_name

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")


def config(algorithm: str = "FedAvg", supervision: str = "base", seed: int = 0, **settings: Any) -> dict[str, Any]:
    """Settings as a run's config.yaml has them: setting B of the paper."""
    options = {name: settings.pop(name) for name in ("alpha", "tau", "phi") if name in settings}
    return {
        "seed_everything": seed,
        "data": {
            "class_path": "jdfl_lightning.data.pacs.PACS",
            "init_args": {"root": "images", "size": 112, "num_clients": 10, "test_fraction": 0.1, "download": False},
        },
        "backbone": "PaperCNN",
        "algorithm": {"class_path": f"jdfl_lightning.algorithms.{algorithm}", "init_args": {"weighting": "samples"}},
        "supervision": as_dict(short_names()[supervision](**options)),
        "num_domains": None,
        "rounds": 150,
        "client_fraction": 0.5,
        "epochs": 5,
        "batch_size": 32,
        "lr": 0.01,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "clustering": {"epochs": 3, "batch_size": None, "layers": "B", "criterion": "elbow", "max_domains": 10},
        "logger": False,
    } | settings


def write_run(
    folder: Path,
    settings: Mapping[str, Any],
    accuracies: Sequence[float],
    domains: Mapping[str, float] | None = None,
    data: str = "abc",
    num_domains: int = 4,
) -> Path:
    """Write a run folder whose rounds have these accuracies; every domain has the same, unless given.

    A round sends 1 MB to the clients and 2 MB back.
    """
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(settings)))
    rows = [
        {"round": number, "test/acc": accuracy, "test/acc_worst": accuracy, "train/loss": 1.0}
        | {f"test/acc/{name}": (domains or {}).get(name, accuracy) for name in domains or DOMAINS}
        | {"bytes/down": 1_000_000, "bytes/up": 2_000_000}
        for number, accuracy in enumerate(accuracies, start=1)
    ]
    write_metrics(folder, rows)
    if supervision_name(settings["supervision"]) != "base":
        (folder / "discovery.json").write_text(json.dumps({"num_domains": num_domains, "data": data}))
    return folder


def write_study(root: Path) -> Path:
    """Three algorithms, four supervisions, three seeds and a sweep over M: noisy curves of 30 rounds on PACS, B."""
    rounds = 30
    level = {"FedAvg": 0.66, "SCAFFOLD": 0.69, "FedDyn": 0.67}
    lift = {"base": 0.0, "hard": -0.004, "graded": 0.015, "random": 0.022}
    kinds: list[tuple[str, str, int | None]] = [(a, s, None) for a in level for s in lift]
    kinds += [("FedAvg", s, m) for s in ("graded", "random") for m in range(2, 8)]
    for algorithm, supervision, given in kinds:
        for seed in range(3):
            noise = random.Random(f"{algorithm} {supervision} {given} {seed}")
            top = level[algorithm] + lift[supervision] + noise.gauss(0, 0.004)
            curve = [top - 0.4 * math.exp(-number / 6) + noise.gauss(0, 0.008) for number in range(rounds)]
            settings = config(algorithm, supervision, seed, rounds=rounds, num_domains=given)
            settings["data"]["init_args"]["size"] = 32
            by_domain = {name: top + shift for name, shift in zip(DOMAINS, (-0.2, 0.04, 0.01, 0.09), strict=True)}
            folder = root / f"{algorithm}-{supervision}-{given}-seed{seed}".lower()
            write_run(folder, settings, curve, by_domain, data=f"split {seed}", num_domains=given or 4)
    unfinished = config("FedProx", "base", 0, rounds=200)
    write_run(root / "fedprox-base-none-seed0", unfinished, [0.3, 0.4])
    (root / "broken").mkdir()
    (root / "broken" / "config.yaml").write_text("lr: [\n")
    return root
