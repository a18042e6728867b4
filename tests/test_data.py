"""Splits, loaders, image folders and the cache."""

from __future__ import annotations

import math
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from helpers import examples
from jdfl_lightning import PACS, DigitsDomains, ImageFolderDomains, OfficeCaltech
from jdfl_lightning.core.errors import InputError, Note
from jdfl_lightning.data import cache
from jdfl_lightning.data.loader import BatchLoader
from jdfl_lightning.data.partition import apportion, partition
from jdfl_lightning.data.transforms import to_input

# --- who holds which image


@examples(60)
@given(
    sizes=st.lists(st.lists(st.integers(1, 25), min_size=3, max_size=3), min_size=1, max_size=4),
    extra=st.integers(0, 8),
    fraction=st.floats(0.05, 0.5),
    seed=st.integers(0, 1000),
)
def test_partition_holds_its_laws(sizes: list[list[int]], extra: int, fraction: float, seed: int) -> None:
    """Every image is somewhere once; one domain a client; hold-outs rounded up, stratified, whatever the clients."""
    labels = torch.tensor([label for domain in sizes for label, n in enumerate(domain) for _ in range(n)])
    domains = torch.tensor([d for d, domain in enumerate(sizes) for n in domain for _ in range(n)])
    names = [f"d{d}" for d in range(len(sizes))]
    try:
        dealt = partition(labels, domains, names, len(sizes) + extra, fraction, seed)
    except InputError:
        totals = [sum(domain) for domain in sizes]
        rest = [total - math.ceil(round(fraction * total, 9)) for total in totals]
        assert min(rest) < 1 or any(a > b for a, b in zip(apportion(rest, len(sizes) + extra), rest, strict=True))
        return
    everything = torch.cat(dealt.clients + dealt.test)
    assert everything.sort().values.tolist() == list(range(len(labels)))
    assert len(dealt.clients) == len(sizes) + extra
    for client, domain in zip(dealt.clients, dealt.client_domains, strict=True):
        assert len(client) > 0
        assert set(domains[client].tolist()) == {domain}
    fewer = partition(labels, domains, names, len(sizes), fraction, seed)
    for domain, held in enumerate(dealt.test):
        count = sum(sizes[domain])
        assert len(held) == math.ceil(round(fraction * count, 9))
        assert torch.equal(held, fewer.test[domain])
        for label, n in enumerate(sizes[domain]):
            assert abs(int((labels[held] == label).sum()) - n * len(held) / count) < 1
    for domain in range(len(sizes)):
        counts = [len(c) for c, d in zip(dealt.clients, dealt.client_domains, strict=True) if d == domain]
        assert max(counts) - min(counts) <= 1


def test_partition_depends_on_the_seed_alone() -> None:
    labels, domains = torch.arange(60) % 3, torch.arange(60) // 30
    first, again, other = (partition(labels, domains, ["a", "b"], 4, 0.2, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.clients + first.test, again.clients + again.test, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.test, other.test, strict=True))


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6), st.integers(0, 60))
def test_apportion_is_in_proportion(sizes: list[int], extra: int) -> None:
    total = len(sizes) + extra
    shares = apportion(sizes, total)
    assert sum(shares) == total
    assert min(shares) >= 1
    for a, b in zip(sizes, shares, strict=True):
        for c, d in zip(sizes, shares, strict=True):
            assert a <= c or b >= d  # a larger domain never has fewer clients


def test_clients_of_the_paper() -> None:
    pacs = [1843, 2109, 1503, 3536]
    assert apportion(pacs, 10) == [2, 2, 2, 4]
    assert apportion(pacs, 40) == [8, 9, 7, 16]


def test_too_many_and_too_few_clients() -> None:
    labels, domains = torch.zeros(20, dtype=torch.long), torch.arange(20) // 10
    with pytest.raises(InputError, match="more than there are images"):
        partition(labels, domains, ["a", "b"], 30, 0.2, 0)
    with pytest.raises(InputError, match="at least 2"):
        partition(labels, domains, ["a", "b"], 1, 0.2, 0)


# --- loaders


def test_loader_gives_every_image_once_and_shuffles_every_pass() -> None:
    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 2, 2, 3).contiguous()
    labels, domains = torch.arange(10), torch.arange(10) // 5
    loader = BatchLoader(images, labels, domains, torch.arange(10), 4, torch.Generator().manual_seed(0))
    passes = []
    for _ in range(2):
        batches = list(loader)
        assert [len(labels) for _, labels, _ in batches] == [4, 4, 2]
        assert len(batches) == len(loader)
        for pixels, label, domain in batches:
            assert pixels.shape[1:] == (3, 2, 2)
            assert pixels.is_contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(pixels[:, 0, 0, 0], label / 127.5 - 1)
            assert torch.equal(domain, label // 5)
        passes.append(torch.cat([label for _, label, _ in batches]).tolist())
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(10))
    assert passes[0] != passes[1]
    assert images.max() == 9  # the images themselves are not touched
    merged = BatchLoader(images, labels, domains, torch.arange(9), 4)
    assert [len(batch[1]) for batch in merged] == [4, 5]  # a last batch of one image joins the one before it
    assert len(merged) == 2
    single = BatchLoader(images, labels, domains, torch.arange(3), 1)
    assert [len(batch[1]) for batch in single] == [1, 1, 1]
    plain = BatchLoader(images, labels, 3, torch.tensor([4, 2]), 8)
    assert [batch[1].tolist() for batch in plain] == [[4, 2]]
    assert next(iter(plain))[2].tolist() == [3, 3]


def test_input_range() -> None:
    pixels = to_input(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 1, 3))
    assert pixels.flatten(1).tolist() == [[-1, -1, -1], [1, 1, 1]]


# --- digits


def test_every_digit_is_used_once_and_domains_look_different(small_digits: DigitsDomains) -> None:
    data = DigitsDomains()
    data.setup()
    assert data.images.shape == (1797, 16, 16, 3)
    counts = torch.stack([torch.bincount(data.labels[data.domains == d], minlength=10) for d in range(4)])
    assert int(counts.sum()) == 1797
    assert int((counts.max(0).values - counts.min(0).values).max()) <= 1
    mean = [data.images[data.domains == d].float().mean().item() for d in range(4)]
    ink, chalk, _, outline = mean
    assert chalk < 110 < ink < outline
    again = DigitsDomains()
    again.deal(5)
    assert torch.equal(again.images, data.images)  # pictures do not depend on the run's seed


def test_sizes_known_before_setup() -> None:
    assert len(PACS().class_names) == 7
    assert len(OfficeCaltech().domain_names) == 4
    assert len(DigitsDomains().class_names) == 10


def test_data_modules_work_as_lightning_ones(image_tree: Path) -> None:
    data = ImageFolderDomains(root=str(image_tree), size=8, num_clients=2)
    data.prepare_data()
    data.setup("fit")
    seen = torch.cat([labels for _, labels, _ in data.train_dataloader()])
    held = torch.cat([labels for _, labels, _ in data.val_dataloader()])
    assert len(seen) == 28
    assert len(held) == 8  # 20 % of 18 is 3.6, rounded up, in each domain


# --- image folders


def test_image_folder(image_tree: Path) -> None:
    (image_tree / "notes.txt").write_text("a stray file")
    (image_tree / "dark" / ".DS_Store").write_bytes(b"x")
    (image_tree / "dark" / "class0" / "Thumbs.db").write_bytes(b"x")
    (image_tree / ".hidden").mkdir()
    data = ImageFolderDomains(root=str(image_tree), size=8, num_clients=2)
    data.setup()
    assert (data.domain_names, data.class_names) == (("bright", "dark"), ("class0", "class1", "class2"))
    assert data.images.shape == (36, 8, 8, 3)
    for label in range(3):
        colours = data.images[data.labels == label].float().mean((0, 1, 2))
        assert int(colours.argmax()) == label
    bright, dark = (data.images[data.domains == d].float().mean() for d in range(2))
    assert bright > dark + 50


def test_a_class_that_a_domain_lacks(image_tree: Path) -> None:
    shutil.rmtree(image_tree / "dark" / "class1")
    with pytest.raises(InputError, match="dark has no image of class1"):
        ImageFolderDomains(root=str(image_tree), size=8, num_clients=2).setup()


def test_names_are_taken_as_they_are(tmp_path: Path) -> None:
    """Classes that differ only in signs or case are different classes; nothing is read twice."""
    root = tmp_path / "tree"
    for domain in ("a", "b"):
        for number, label in enumerate(("C", "C++", "猫", "狗")):
            folder = root / domain / label
            folder.mkdir(parents=True)
            for copy in range(3):
                Image.fromarray(np.full((9, 9, 3), 60 * number + copy, dtype=np.uint8)).save(folder / f"{copy}.png")
    data = ImageFolderDomains(root=str(root), size=8, num_clients=2)
    data.setup()
    assert data.class_names == ("C", "C++", "狗", "猫")
    assert len(data.images.flatten(1).unique(dim=0)) == 12
    (root / "a" / "C").rename(root / "a" / "c")
    with pytest.raises(InputError, match="a has no image of C"):
        ImageFolderDomains(root=str(root), size=8, num_clients=2).setup()
    (root / "a").rename(root / "worst")
    with pytest.raises(InputError, match="'worst': rename it"):
        ImageFolderDomains(root=str(root), size=8, num_clients=2).setup()


def test_two_spellings_of_one_name_are_refused(tmp_path: Path) -> None:
    make_known(tmp_path, {d: d for d in PACS.domain_names}, {c: c for c in PACS.class_names})
    shutil.copytree(tmp_path / "photo", tmp_path / "Photo")
    with pytest.raises(InputError, match=r"Photo and .*photo"):
        PACS(root=str(tmp_path), size=8, num_clients=4).setup()


def test_a_dangling_link_is_named(image_tree: Path) -> None:
    (image_tree / "dark" / "class1" / "z.png").symlink_to("nowhere.png")
    with pytest.raises(InputError, match=r"z\.png cannot be read"):
        ImageFolderDomains(root=str(image_tree), size=8, num_clients=2).setup()


def test_an_unreadable_image_is_named(image_tree: Path) -> None:
    broken = image_tree / "dark" / "class1" / "3.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(InputError, match=r"dark/class1/3\.png cannot be read"):
        ImageFolderDomains(root=str(image_tree), size=8, num_clients=2).setup()


@pytest.mark.parametrize("root", [None, "nowhere"])
def test_missing_root(root: str | None) -> None:
    with pytest.raises(InputError, match=r"--data\.root"):
        ImageFolderDomains(root=root, size=8, num_clients=2).setup()


def test_empty_root(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found none"):
        ImageFolderDomains(root=str(tmp_path), size=8, num_clients=2).setup()


def make_known(root: Path, domains: dict[str, str], classes: dict[str, str], level: str = "") -> None:
    """A tree with one picture for each class, its folders spelt as asked."""
    for domain in domains.values():
        for label in classes.values():
            folder = root / level / domain / label
            folder.mkdir(parents=True)
            for number in range(2):
                Image.fromarray(np.zeros((9, 9, 3), dtype=np.uint8)).save(folder / f"{number}.jpg")


@pytest.mark.parametrize("level", ["", "PACS", "kfold", "pacs/images", "raw_images", "Homework3-PACS-master/PACS"])
def test_pacs_layouts(tmp_path: Path, level: str) -> None:
    make_known(tmp_path, {d: d for d in PACS.domain_names}, {c: c for c in PACS.class_names}, level)
    data = PACS(root=str(tmp_path), size=8, num_clients=4)
    with pytest.warns(Note, match="not comparable"):
        data.setup()
    assert len(data.images) == 4 * 7 * 2


def test_office_caltech_spellings(tmp_path: Path) -> None:
    domains = {d: d for d in OfficeCaltech.domain_names} | {"caltech": "Caltech"}
    classes = {c: c for c in OfficeCaltech.class_names} | {
        "backpack": "back_pack",
        "laptop_computer": "laptop-computer",
    }
    make_known(tmp_path, domains, classes, "office_caltech_10")
    images = tmp_path / "office_caltech_10" / "webcam" / "images"
    webcam = [path for path in images.parent.iterdir() if path != images]
    images.mkdir()
    for folder in webcam:
        folder.rename(images / folder.name)
    (tmp_path / "office_caltech_10" / ".DS_Store").write_bytes(b"x")
    data = OfficeCaltech(root=str(tmp_path), size=8)
    with pytest.warns(Note, match="not comparable"):
        data.setup()
    assert data.domain_names == OfficeCaltech.domain_names
    assert len(data.images) == 4 * 10 * 2


def test_known_set_in_the_wrong_folder_tells_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"art_painting.*--data\.download true.*<domain>/<class>/<image>"):
        PACS(root=str(tmp_path), size=8).setup()


# --- the cache


def test_cache_is_used_and_follows_the_files(image_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> torch.Tensor:
        data = ImageFolderDomains(root=str(image_tree), size=8, num_clients=2)
        data.setup()
        return data.images

    calls: list[tuple[str, int, int]] = []
    fresh = cache.decode_all(sorted(image_tree.rglob("*.png")), 8, lambda *call: calls.append(call))
    assert calls[-1] == ("decoding images", 36, 36)
    assert sorted(call[1] for call in calls) == list(range(1, 37))
    first = load()
    assert torch.equal(first, fresh)
    real = cache.decode
    monkeypatch.setattr(cache, "decode", lambda *_: pytest.fail("decoded again"))
    assert torch.equal(load(), first)
    monkeypatch.setattr(cache, "decode", real)
    Image.fromarray(np.full((9, 9, 3), 255, dtype=np.uint8)).save(image_tree / "bright" / "class0" / "0.png")
    assert int(load()[0].min()) == 255  # a changed file is another key
    first[:] = 0  # copy on write: what one process writes stays its own
    assert int(load()[0].min()) == 255


def test_damaged_cache_is_replaced(image_tree: Path) -> None:
    paths = sorted(image_tree.rglob("*.png"))
    images = cache.decode_all(paths, 8, lambda *_: None).clone()
    (file,) = cache.cache_folder().glob("*.npy")
    file.write_bytes(file.read_bytes()[:100])
    assert torch.equal(cache.decode_all(paths, 8, lambda *_: None), images)
    assert torch.equal(torch.from_numpy(np.load(file)), images)


def test_unwritable_cache_is_no_obstacle(image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("JDFL_CACHE", str(blocked))
    with pytest.warns(Note, match="could not be kept"):
        images = cache.decode_all(sorted(image_tree.rglob("*.png")), 8, lambda *_: None)
    assert images.shape == (36, 8, 8, 3)


def test_image_modes_that_occur(tmp_path: Path) -> None:
    rgb = Image.fromarray(np.full((20, 10, 3), 200, dtype=np.uint8))
    for mode, name in (("L", "grey.png"), ("P", "palette.png"), ("RGBA", "alpha.png"), ("CMYK", "print.jpg")):
        rgb.convert(mode).save(tmp_path / name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pixels = cache.decode(tmp_path / name, 8)
        assert pixels.shape == (8, 8, 3)
        assert abs(int(pixels.mean()) - 200) < 4
    ink = np.zeros((20, 20, 4), dtype=np.uint8)
    ink[:, :10, 3] = 255  # the left half is black ink, the right one is transparent
    Image.fromarray(ink).save(tmp_path / "ink.png")
    pixels = cache.decode(tmp_path / "ink.png", 8)
    assert (pixels[:, :3] == 0).all()
    assert (pixels[:, 5:] == 255).all()
    Image.fromarray(np.full((9, 9), 0x8080, dtype=np.uint16)).save(tmp_path / "deep.png")
    assert (cache.decode(tmp_path / "deep.png", 8) == 0x80).all()
    turned = Image.fromarray(np.repeat(np.array([[0, 255]], dtype=np.uint8), 16, 0).repeat(8, 1))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to see it upright: the dark left half becomes the top
    turned.save(tmp_path / "turned.jpg", exif=exif)
    upright = cache.decode(tmp_path / "turned.jpg", 8)
    assert upright[:2].mean() < 30 < 220 < upright[-2:].mean()


# --- the real images


@pytest.mark.slow
def test_hold_out_sizes_are_the_papers(real_data: Path) -> None:
    pacs = PACS(root=str(real_data / "pacs"), size=8, num_clients=40)
    pacs.setup()
    assert [len(held) for held in pacs.partition.test] == [205, 235, 167, 393]
    assert [pacs.partition.client_domains.count(d) for d in range(4)] == [8, 9, 7, 16]
    office = OfficeCaltech(root=str(real_data / "office_caltech_10"), size=8)
    office.setup()
    assert [len(held) for held in office.partition.test] == [192, 225, 32, 59]
    assert [len(held) for held in office.partition.clients] == [766, 898, 125, 236]


@pytest.mark.slow
def test_second_start_reads_the_cache_in_no_time(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a timing: the second start opens no image at all."""
    monkeypatch.setenv("JDFL_CACHE", str(tmp_path / "cache"))
    root = str(real_data / "office_caltech_10")
    OfficeCaltech(root=root, size=8).setup()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "decode", lambda *_: pytest.fail("decoded again"))
        OfficeCaltech(root=root, size=8).setup()
    assert len(list(cache.cache_folder().glob("*.npy"))) == 1
