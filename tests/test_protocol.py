"""Who trains, validates and tests on which images: validation, unseen domains, mixtures, skew, duplicates."""

from __future__ import annotations

import hashlib
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from helpers import examples, experiment
from jdfl_lightning import PACS, DigitsDomains, ImageFolderDomains, OfficeCaltech, SiteFolders, fit
from jdfl_lightning.core.errors import InputError, Note
from jdfl_lightning.data.base import Roster
from jdfl_lightning.data.partition import Partition, apportion, partition
from jdfl_lightning.data.summary import data_table

# --- the split that there was before there were options


def digest(dealt: Partition) -> str:
    found = hashlib.blake2b(digest_size=16)
    for indices in (*dealt.clients, *dealt.test):
        found.update(f"{len(indices)} ".encode() + indices.numpy().tobytes())
    found.update(str(dealt.client_domains).encode())
    return found.hexdigest()


@pytest.mark.parametrize(
    ("seed", "num_clients", "split", "fingerprint"),
    [
        (0, 4, "9b2c50c307dc6760d77e6da00329f3fa", "0b3d020cda09c7cb4465027695da15bc"),
        (0, 10, "817b8848ae3f623cb7d05303ad83a21e", "4916d181443e4512432b47dc7bf2c546"),
        (1, 10, "698567a7391af91d546fa2949c6a703f", "3a8cef9cf12091e34ab2c233bcb567ea"),
        (7, 23, "ce7c3ae9c3f21ae20358f57957e32dad", "7e908b5734c70174d93aa93e143e72ba"),
    ],
)
def test_digits_are_split_as_in_version_0_1(seed: int, num_clients: int, split: str, fingerprint: str) -> None:
    data = DigitsDomains(size=8, num_clients=num_clients)
    assert digest(data.deal(seed)) == split
    assert data.fingerprint() == fingerprint
    assert data.partition.val == data.partition.unseen == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "pacs", "office"),
    [
        (0, "ca26f5131fffb2f273454fd619ef6bce", "21697bf3f35f46c1626c7e7802b2e34b"),
        (1, "fbae730cd5e8933f38ca5ebcca031bed", "2a356db361d29219e4092598e1b393bc"),
        (2, "4eabacbe62e6415722cefdaefc14d62c", "7414028c28cacf506e85714c28725255"),
    ],
)
def test_real_images_are_split_as_in_version_0_1(real_data: Path, seed: int, pacs: str, office: str) -> None:
    assert digest(PACS(str(real_data / "pacs"), size=8, num_clients=40).deal(seed)) == pacs
    assert digest(OfficeCaltech(str(real_data / "office_caltech_10"), size=8).deal(seed)) == office


# --- laws of every split


def images_of(sizes: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and domains of images: so many for each domain and class."""
    labels = [label for domain in sizes for label, n in enumerate(domain) for _ in range(n)]
    return torch.tensor(labels), torch.tensor([d for d, domain in enumerate(sizes) for n in domain for _ in range(n)])


SIZES = st.lists(st.lists(st.integers(4, 25), min_size=3, max_size=3), min_size=2, max_size=4)


@examples(80)
@given(
    sizes=SIZES,
    extra=st.integers(0, 6),
    val=st.sampled_from([0.0, 0.1, 0.3]),
    mix=st.floats(0, 1),
    skew=st.none() | st.sampled_from([0.1, 0.5, 1.0, 100.0]),
    unseen=st.booleans(),
    copied=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_split_holds_its_laws(
    sizes: list[list[int]],
    extra: int,
    val: float,
    mix: float,
    skew: float | None,
    unseen: bool,
    copied: bool,
    seed: int,
) -> None:
    """Every image is somewhere once; who is tested on what depends on no option; sizes survive a mixture."""
    labels, domains = images_of(sizes)
    seen = len(sizes) - unseen
    names, number = [f"d{d}" for d in range(seen)], seen + extra
    copies = torch.arange(len(labels)) // 2 if copied else None  # neighbours are identical
    options: dict[str, Any] = {"val_fraction": val, "label_skew": skew, "copies": copies}
    plain = partition(labels, domains, names, number, 0.2, seed)
    try:
        dealt = partition(labels, domains, names, number, 0.2, seed, domain_mix=mix, **options)
    except InputError as error:
        possible = ["label_skew"] * (skew is not None) + ["num_clients"] * copied
        if not any(name in str(error) for name in possible):
            raise
        return
    everything = torch.cat([*dealt.clients, dealt.held_out, dealt.dropped])
    assert everything.sort().values.tolist() == list(range(len(labels)))
    assert all(torch.equal(a, b) for a, b in zip(dealt.test, plain.test, strict=True))
    assert [len(part) for part in dealt.unseen] == ([sum(sizes[-1])] if unseen else [])
    assert len(dealt.clients) == number
    assert min(dealt.sizes) >= 1
    unmixed = partition(labels, domains, names, number, 0.2, seed, **options)
    assert dealt.sizes == unmixed.sizes
    assert all(torch.equal(a, b) for a, b in zip(dealt.val, unmixed.val, strict=True))
    for client, domain in zip(dealt.clients, dealt.client_domains, strict=True):
        counts = torch.bincount(domains[client], minlength=seen)
        assert counts[domain] == counts.max()
    for domain, held in enumerate(dealt.val):
        rest = sum(sizes[domain]) - len(dealt.test[domain])
        assert len(held) == math.ceil(round(val * rest, 9))
        assert set(domains[held].tolist()) == {domain}
        for label in range(3):
            own = sizes[domain][label] - int((labels[dealt.test[domain]] == label).sum())
            assert abs(int((labels[held] == label).sum()) - own * len(held) / rest) < 1
    if copies is None:
        assert len(dealt.dropped) == 0
    else:
        kept_back = set(copies[dealt.held_out].tolist())
        assert not kept_back & set(copies[torch.cat(dealt.clients)].tolist())
        assert set(copies[dealt.dropped].tolist()) <= kept_back


def test_validation_has_random_numbers_of_its_own() -> None:
    labels, domains = images_of([[40, 40], [40, 40]])
    first, again, other = (partition(labels, domains, "ab", 2, 0.2, seed, val_fraction=0.25) for seed in (0, 0, 1))
    assert [torch.equal(a, b) for a, b in zip(first.val, again.val, strict=True)] == [True, True]
    assert not torch.equal(first.val[0], other.val[0])
    assert [len(held) for held in first.val] == [16, 16]  # a quarter of the 64 that are not tested on
    with pytest.raises(InputError, match=r"--data\.val_fraction.*0\.999 of the 64 images of a is 64"):
        partition(labels, domains, "ab", 2, 0.2, 0, val_fraction=0.999)


# --- mixtures of domains


@examples(40)
@given(sizes=SIZES, extra=st.integers(0, 6), mix=st.floats(0, 1), seed=st.integers(0, 100))
def test_mixtures_are_in_proportion(sizes: list[list[int]], extra: int, mix: float, seed: int) -> None:
    """A client gives lambda of its images, rounded, and gets as many, in the proportions of all that are given.

    Of G turns in all, a client has g, spread evenly. When it is a part t of the way, each client has had its part t of
    turns within 1/2, so that L = tG turns within n/2: in the first L, it has gL/G within 1/2 + ng/2G. A domain is a
    segment with two ends.
    """
    labels, domains = images_of(sizes)
    names, number = [f"d{d}" for d in range(len(sizes))], len(sizes) + extra
    plain = partition(labels, domains, names, number, 0.2, seed)
    mixed = partition(labels, domains, names, number, 0.2, seed, domain_mix=mix)
    given_by = [math.floor(mix * size + 0.5) for size in plain.sizes]
    total = [sum(g for g, d in zip(given_by, plain.client_domains, strict=True) if d == k) for k in range(len(sizes))]
    for client, home in enumerate(plain.client_domains):
        before, after = (torch.bincount(domains[p.clients[client]], minlength=len(sizes)) for p in (plain, mixed))
        for domain in range(len(sizes)):
            kept = int(before[domain]) - given_by[client] * (domain == home)
            share = given_by[client] * total[domain] / max(sum(total), 1)
            bound = 1 + number * given_by[client] / max(sum(total), 1)
            assert abs(int(after[domain]) - kept - share) <= bound + 1e-9
    if mix == 0:
        assert digest(mixed) == digest(plain)


def test_a_full_mixture_is_the_same_for_all() -> None:
    """200, 100 and 100 images to train on, 8 clients of 50: half of each client's are of the first domain."""
    labels, domains = images_of([[125, 125], [62, 63], [63, 62]])
    mixed = partition(labels, domains, "abc", 8, 0.2, 0, domain_mix=1.0)
    assert mixed.sizes == [50] * 8
    for client in mixed.clients:
        assert (torch.bincount(domains[client]) - torch.tensor([25, 12.5, 12.5])).abs().max() <= 1
        assert (torch.bincount(labels[client]) - 25).abs().max() <= 2
    assert mixed.client_domains == [0] * 8
    half = partition(labels, domains, "abc", 8, 0.2, 0, domain_mix=0.5)
    assert [torch.bincount(domains[half.clients[c]]).tolist()[0] for c in (0, 7)] == pytest.approx([37.5, 12.5], abs=1)
    assert half.client_domains == partition(labels, domains, "abc", 8, 0.2, 0).client_domains


# --- skewed classes


def test_skew_follows_alpha() -> None:
    """With a large alpha a client has its share of every class; with a small one, few classes."""
    labels, domains = images_of([[100] * 5, [100] * 5])
    even = partition(labels, domains, "ab", 8, 0.2, 0, label_skew=1e7)
    counts = torch.stack([torch.bincount(labels[client], minlength=5) for client in even.clients])
    assert counts.float().sub(20).abs().max() <= 1
    few = partition(labels, domains, "ab", 8, 0.2, 0, label_skew=0.1)
    counts = torch.stack([torch.bincount(labels[client], minlength=5) for client in few.clients]).float()
    largest = counts.max(dim=0).values  # of the 80 of a class in each domain
    assert largest.min() > 40
    assert [set(domains[client].tolist()) for client in few.clients] == [{0}] * 4 + [{1}] * 4
    assert digest(few) != digest(partition(labels, domains, "ab", 8, 0.2, 1, label_skew=0.1))
    assert digest(few) == digest(partition(labels, domains, "ab", 8, 0.2, 0, label_skew=0.1))


def test_proportions_are_those_of_a_dirichlet_distribution() -> None:
    """The share of a class that the first of two clients has is uniform for alpha = 1, and has variance 1 / 12."""
    labels, domains = images_of([[1000] * 400])
    dealt = partition(labels, domains, ["a"], 2, 0.001, 3, label_skew=1.0)
    counts = np.bincount(labels[dealt.clients[0]], minlength=400)
    shares = counts / (counts + np.bincount(labels[dealt.clients[1]], minlength=400))
    assert shares.mean() == pytest.approx(1 / 2, abs=4 / math.sqrt(12 * 400))
    assert shares.var() == pytest.approx(1 / 12, abs=4 * math.sqrt(1 / 180 / 400))  # var((x - 1/2)^2) = 1 / 180


def test_skew_that_leaves_a_client_without_images() -> None:
    labels, domains = images_of([[12, 12]])
    with pytest.raises(InputError, match=r"--data\.label_skew.*0\.001.*18 clients of a.*raise it"):
        partition(labels, domains, ["a"], 18, 0.2, 0, label_skew=0.001)


# --- unseen domains


def test_an_unseen_domain_has_no_client() -> None:
    data = DigitsDomains(size=8, num_clients=6, unseen="chalk", val_fraction=0.1)
    plain = DigitsDomains(size=8, num_clients=6)
    data.setup()
    plain.setup()
    assert list(data.domain_names) == ["ink", "photo", "outline"]
    assert list(data.unseen_names) == ["chalk"]
    (held,) = data.partition.unseen
    assert torch.equal(held, (plain.domains == 1).nonzero().squeeze(1))
    assert set(data.true_domains or ()) == {"ink", "photo", "outline"}
    names = [*data.domain_names, *data.unseen_names]
    assert [names[d] for d in data.domains.tolist()] == [plain.domain_names[d] for d in plain.domains.tolist()]
    assert sum(len(labels) for _, labels, _ in data.unseen_dataloader()) == 449
    assert {d for _, _, domains in data.unseen_dataloader() for d in domains.tolist()} == {3}
    assert {d for _, _, domains in data.test_dataloader() for d in domains.tolist()} == {0, 1, 2}
    assert list(plain.unseen_dataloader()) == []
    before = data.fingerprint()
    data.partition.unseen[0] = held[1:]
    assert data.fingerprint() != before
    run = fit(experiment(data=DigitsDomains(size=8, num_clients=4, unseen=["chalk"]), num_domains=2, rounds=1))
    assert set(run.domains) == {"ink", "photo", "outline"}


@pytest.mark.parametrize(
    ("unseen", "message"),
    [
        ("chalks", "Did you mean 'chalk'"),
        (["ink", "foto"], "Did you mean 'photo'"),
        (["ink", "chalk", "photo", "outline"], "such that clients have a domain"),
        (3, r"--data\.unseen to be of type"),
    ],
)
def test_unseen_domains_that_are_refused(unseen: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        DigitsDomains(size=8, unseen=unseen)


class Three(DigitsDomains):
    """Has a list of domains as a class, and a shorter one as an object."""

    def __init__(self, unseen: str | None = None) -> None:
        super().__init__(size=8, num_clients=2, unseen=unseen)
        self.domain_names = ("ink", "chalk", "photo")  # type: ignore[assignment]  # a shorter tuple

    def load(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        images, labels, domains = super().load()
        kept = domains < 3
        return images[kept], labels[kept], domains[kept]


@pytest.mark.parametrize("loaded", [False, True])
def test_other_unseen_domains_of_an_object_with_domains_of_its_own(loaded: bool) -> None:
    data = Three(unseen="ink")
    if loaded:
        data.setup()
        assert (list(data.domain_names), list(data.unseen_names)) == (["chalk", "photo"], ["ink"])
    other = data.with_unseen("photo")
    assert (list(other.domain_names), list(other.unseen_names)) == (["ink", "chalk", "photo"], [])
    other.setup()
    assert (list(other.domain_names), list(other.unseen_names)) == (["ink", "chalk"], ["photo"])
    with pytest.raises(InputError, match=r"one of 'ink', 'chalk', 'photo' but got 'outline'"):
        data.with_unseen("outline")


def test_an_unseen_folder_is_named(image_tree: Path) -> None:
    with pytest.raises(InputError, match=r"one of 'bright', 'dark' but got 'drak'\. Did you mean 'dark'"):
        ImageFolderDomains(str(image_tree), size=8, num_clients=2, unseen="drak").setup()
    data = ImageFolderDomains(str(image_tree), size=8, num_clients=2, unseen="bright")
    data.setup()
    assert list(data.domain_names) == ["dark"]
    assert (
        data.images[data.partition.unseen[0]].float().mean() > data.images[data.partition.test[0]].float().mean() + 50
    )


# --- validation, missing classes, sites


def test_validation_images_are_their_own() -> None:
    data = DigitsDomains(size=8, num_clients=4, val_fraction=0.25)
    data.setup()
    assert torch.equal(data.val_dataloader().indices, torch.cat(data.partition.val))
    assert torch.equal(data.test_dataloader().indices, torch.cat(data.partition.test))
    plain = DigitsDomains(size=8, num_clients=4)
    plain.setup()
    assert torch.equal(plain.val_dataloader().indices, torch.cat(plain.partition.test))
    before = data.fingerprint()
    data.partition.val[0] = data.partition.val[0][1:]
    assert data.fingerprint() != before


def test_domains_may_lack_classes(image_tree: Path) -> None:
    shutil.rmtree(image_tree / "dark" / "class1")
    with pytest.raises(InputError, match=r"dark has no image of class1.*--data\.missing_classes allow"):
        ImageFolderDomains(str(image_tree), size=8, num_clients=2).setup()
    data = ImageFolderDomains(str(image_tree), size=8, num_clients=2, missing_classes="allow")
    data.setup()
    assert data.class_names == ("class0", "class1", "class2")
    assert data.describe()["train"]["dark"].keys() == {"class0", "class2"}
    assert data.untested() == {}
    fit(experiment(data=data, num_domains=2, rounds=1))


def test_sites_keep_what_they_have(image_tree: Path) -> None:
    roots = [str(image_tree / name) for name in ("bright", "dark")]
    data = SiteFolders(roots, size=8, num_clients=2, val_fraction=0.25)
    dealt = data.deal(0)
    assert [len(part) for part in (*dealt.test, *dealt.val, *dealt.clients)] == [4, 4, 4, 4, 10, 10]
    assert torch.cat([*dealt.clients, dealt.held_out]).sort().values.tolist() == list(range(36))
    plain = SiteFolders(roots, size=8, num_clients=2).deal(0)
    assert all(torch.equal(a, b) for a, b in zip(dealt.test, plain.test, strict=True))
    assert plain.val == []
    alone = SiteFolders(size=8, num_clients=2, val_fraction=0.25)
    alone.stand_alone(1, roots[1])
    own = alone.deal(0)
    assert torch.equal(own.val[0] + 18, dealt.val[1])  # the same images, whoever else is there
    wrong: list[dict[str, Any]] = [{"unseen": "site0"}, {"domain_mix": 0.5}, {"label_skew": 1.0}]
    for options in [*wrong, {"missing_classes": "allow"}, {"drop_duplicates": True}]:
        with pytest.raises(InputError, match=rf"--data\.{next(iter(options))} to be .* for SiteFolders"):
            SiteFolders(roots, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 1}, r"--data\.val_fraction to be at least 0 and below 1"),
        ({"val_fraction": None}, r"--data\.val_fraction to be of type float"),
        ({"domain_mix": 1.5}, r"--data\.domain_mix to be between 0 and 1"),
        ({"label_skew": 0}, r"--data\.label_skew to be null, or positive"),
        ({"label_skew": math.inf}, r"--data\.label_skew to be null, or positive"),
        ({"missing_classes": "alow"}, "Did you mean 'allow'"),
        ({"drop_duplicates": "yes"}, r"--data\.drop_duplicates to be of type bool"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DigitsDomains(size=8, **options)


# --- duplicates


def test_duplicates_are_found_and_dropped(image_tree: Path) -> None:
    data = ImageFolderDomains(str(image_tree), size=8, num_clients=2)
    data.setup()
    assert data.duplicated() == 0
    files = sorted(image_tree.rglob("*.png"))
    tested, trained = data.partition.test[0][0], data.partition.clients[1][0]
    shutil.copy(files[tested], files[trained])  # a test image of one domain is a training image of the other
    data = ImageFolderDomains(str(image_tree), size=8, num_clients=2)
    data.setup()
    assert data.duplicated() == 1
    with pytest.warns(Note, match=r"1 of the 8 held-out images.*--data\.drop_duplicates true"):
        fit(experiment(data=data, num_domains=2, rounds=1))
    without = ImageFolderDomains(str(image_tree), size=8, num_clients=2, drop_duplicates=True)
    without.setup()
    assert without.duplicated() == 0
    assert without.partition.dropped.tolist() == [int(trained)]
    assert all(torch.equal(a, b) for a, b in zip(without.partition.test, data.partition.test, strict=True))
    fit(experiment(data=without, num_domains=2, rounds=1))  # with no note


@pytest.mark.slow
def test_duplicates_of_office_caltech(real_data: Path) -> None:
    """Counted by the bytes of the files, too: 11 of 508."""
    root = real_data / "office_caltech_10"
    data = OfficeCaltech(str(root), size=8)
    data.deal(0)
    files = [path for classes in data.find(root).values() for paths in classes.values() for path in paths]
    content = [hashlib.blake2b(path.read_bytes()).digest() for path in files]
    trained = {content[index] for index in torch.cat(data.partition.clients).tolist()}
    assert data.duplicated() == sum(content[i] in trained for i in data.partition.held_out.tolist()) == 11
    without = OfficeCaltech(str(root), size=8, drop_duplicates=True)
    without.deal(0)
    assert without.duplicated() == 0


# --- what is told of it


def test_a_description_has_all_numbers() -> None:
    options: dict[str, Any] = {"val_fraction": 0.1, "unseen": "ink", "domain_mix": 0.5, "label_skew": 2.0}
    data = DigitsDomains(size=8, num_clients=5, **options)
    about = data.describe()
    assert json.loads(json.dumps(about)) == about
    assert about["protocol"].items() >= {**options, "num_clients": 5, "test_fraction": 0.2}.items()
    assert [client["images"] for client in about["clients"]] == data.partition.sizes
    for part, indices in (
        ("train", data.partition.clients),
        ("val", data.partition.val),
        ("test", data.partition.test),
    ):
        assert sum(sum(classes.values()) for classes in about[part].values()) == sum(map(len, indices))
    assert about["unseen"] == {
        "ink": {str(d): int(((data.domains == 3) & (data.labels == d)).sum()) for d in range(10)}
    }
    for client, own in zip(about["clients"], data.partition.clients, strict=True):
        assert sum(client["domains"].values()) == sum(client["classes"].values()) == len(own)
        assert client["classes"].get("7", 0) == int((data.labels[own] == 7).sum())
        assert client["domain"] == max(client["domains"], key=client["domains"].get)
    assert about["duplicates"] == {"held_out": 0, "dropped": 0}


def test_the_table_of_a_description() -> None:
    data = DigitsDomains(size=8, num_clients=4, val_fraction=0.25, unseen="chalk")
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(data_table(data.describe()))
    lines = {cells[0]: cells[1:] for line in console.export_text().splitlines() if (cells := line.strip("│ ").split())}
    lines = {name: [cell for cell in cells if cell != "│"] for name, cells in lines.items()}
    shares = apportion([270, 269, 269], 4)
    trained = torch.cat(data.partition.clients)
    ink = torch.bincount(data.labels[trained[data.domains[trained] == data.domain_names.index("ink")]]).tolist()
    # 450: 90 of them tested on, 90 of 360 validated on
    assert lines["ink"] == [str(shares[0]), "270", "90", "90", "10", str(min(ink)), "to", str(max(ink))]
    assert lines["outline"][:5] == [str(shares[2]), "269", "90", "90", "10"]
    assert lines["chalk"] == ["(unseen)", "-", "-", "-", "449", "10", "-"]
    assert lines["all"][:5] == ["4", "808", "270", "270", "10"]
    counts = torch.bincount(data.labels[trained]).tolist()
    assert lines["all"][5:] == [str(min(counts)), "to", str(max(counts))]


def test_a_server_without_images_describes_what_it_knows() -> None:
    data = SiteFolders(num_clients=2)
    data.roster = Roster([3, 4], "x")
    about = data.describe()
    assert about["clients"] == [{"images": 3}, {"images": 4}]
    assert "train" not in about
    assert data_table(about).row_count == 1
