"""PACS: photo, art painting, cartoon and sketch, seven classes (Li et al., 2017)."""

from __future__ import annotations

from jdfl_lightning.data.download import Mirror, google_drive
from jdfl_lightning.data.folder import KnownDomains
from jdfl_lightning.data.options import DataOptions, Unpack


class PACS(KnownDomains):
    """PACS: 9,991 images of 7 classes in 4 domains.

    The published fold lists are not used: their test lists contain the training images.

    Args:
        root: the folder of the domains, or one that contains it.
        size: height and width that the images are resized to; null for that of the backbone's weights, or 112.
        num_clients: N; the paper has 10 or 40.
        test_fraction: share of every domain that is held out, rounded up.
        download: fetch the images into ``root`` if they are not there.
        **options: those of every data module.
    """

    domain_names = ("art_painting", "cartoon", "photo", "sketch")
    class_names = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    counts = {
        "art_painting": (379, 255, 285, 184, 201, 295, 449),
        "cartoon": (389, 457, 346, 135, 324, 288, 405),
        "photo": (189, 202, 182, 186, 199, 280, 432),
        "sketch": (772, 740, 753, 608, 816, 80, 160),
    }
    mirrors = (  # their digests are not known: what is unpacked is checked by its counts
        Mirror("https://github.com/MachineLearning2020/Homework3-PACS/archive/refs/heads/master.zip"),
        Mirror(google_drive("1JFr8f805nMUelQWWmfnJR3y4_SYoN5Pd")),
        Mirror(google_drive("1m4X4fROCCXMO0lRLrr6Zz9Vb3974NWhE")),
    )
    terms = "none were published with the data set; use it for research."

    def __init__(
        self,
        root: str | None = None,
        size: int | None = None,
        num_clients: int = 10,
        test_fraction: float = 0.1,
        download: bool = False,
        **options: Unpack[DataOptions],
    ) -> None:
        super().__init__(root, size, num_clients, test_fraction, download, **options)
