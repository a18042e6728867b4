"""What a partition looks like in numbers: images by domain, class and client; as plain values and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch import Tensor

if TYPE_CHECKING:
    from jdfl_lightning.data.base import DomainDataModule

PROTOCOL = (
    *("num_clients", "test_fraction", "val_fraction", "unseen"),
    *("domain_mix", "label_skew", "missing_classes", "drop_duplicates"),
)
"""Arguments of a data module that decide who has which images."""


def describe(data: DomainDataModule) -> dict[str, Any]:
    """Return the numbers of images as plain values; classes and domains without any are left out.

    Args:
        data: a data module that is set up. If its images are at remote sites, only the clients' sizes are known.
    """
    about: dict[str, Any] = {
        "data": type(data).__name__,
        "protocol": {name: getattr(data, name) for name in PROTOCOL},
        "classes": list(data.class_names),
    }
    if data.roster is not None:
        return about | {"clients": [{"images": size} for size in data.client_sizes]}
    dealt, domains = data.partition, [*data.domain_names, *data.unseen_names]
    everything = torch.cat(dealt.clients)

    def classes(indices: Tensor) -> dict[str, int]:
        return _count(data.labels[indices], data.class_names)

    def held(names: Sequence[str], parts: Sequence[Tensor]) -> dict[str, dict[str, int]]:
        return {name: classes(part) for name, part in zip(names, parts, strict=False)}

    train = [everything[data.domains[everything] == domain] for domain in range(len(data.domain_names))]
    clients = [
        {
            "images": len(own),
            "domain": data.domain_names[domain],
            "domains": _count(data.domains[own], domains),
            "classes": classes(own),
        }
        for own, domain in zip(dealt.clients, dealt.client_domains, strict=True)
    ]
    return about | {
        "train": held(data.domain_names, train),
        "val": held(data.domain_names, dealt.val),
        "test": held(data.domain_names, dealt.test),
        "unseen": held(data.unseen_names, dealt.unseen),
        "duplicates": {"held_out": data.duplicated(), "dropped": len(dealt.dropped)},
        "clients": clients,
    }


def _count(places: Tensor, names: Sequence[str]) -> dict[str, int]:
    counts = torch.bincount(places, minlength=len(names)).tolist()
    return {name: number for name, number in zip(names, counts, strict=True) if number}


def data_table(about: dict[str, Any]) -> Table:
    """Return a table with a line for each domain: its clients, its images by part, and the images of a class.

    The last column has the smallest and the largest number of training images of a class.

    Args:
        about: what `describe` returns.
    """
    parts = [part for part in ("train", "val", "test") if part == "train" or about.get(part)]
    table = Table(title=f"{about['data']}: images", title_justify="left")
    for column in ("domain", "clients", *parts, "classes", "images a class"):
        table.add_column(column, justify="left" if column == "domain" else "right")
    total = [len(about["clients"]), *([0] * len(parts))]
    for domain, classes in about.get("train", {}).items():
        owners = sum(client["domain"] == domain for client in about["clients"])
        numbers = [owners, *(sum(about[part][domain].values()) for part in parts)]
        total[1:] = [before + number for before, number in zip(total[1:], numbers[1:], strict=True)]
        table.add_row(domain, *map(_shown, numbers), _shown(len(classes)), _range(classes, about["classes"]))
    for domain, classes in about.get("unseen", {}).items():
        blank = [_shown(sum(classes.values())) if part == "test" else "-" for part in parts]
        table.add_row(f"{domain} (unseen)", "-", *blank, _shown(len(classes)), "-")
    if "train" not in about:
        total[1] = sum(client["images"] for client in about["clients"])
    everything = Counter[str]()
    for classes in about.get("train", {}).values():
        everything.update(classes)
    ends = _range(everything, about["classes"]) if everything else "-"
    table.add_row("all", *map(_shown, total), _shown(len(about["classes"])), ends, style="bold")
    return table


def _range(counts: Mapping[str, int], names: Sequence[str]) -> str:
    numbers = [counts.get(name, 0) for name in names]
    return f"{_shown(min(numbers))} to {_shown(max(numbers))}"


def _shown(number: int) -> str:
    return f"{number:,}"
