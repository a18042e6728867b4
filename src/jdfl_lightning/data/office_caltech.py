"""Office-Caltech-10: ten classes shared by Office-31 and Caltech-256 (Gong et al., 2012)."""

from __future__ import annotations

from jdfl_lightning.data.download import Mirror
from jdfl_lightning.data.folder import KnownDomains
from jdfl_lightning.data.options import DataOptions, Unpack


class OfficeCaltech(KnownDomains):
    """Office-Caltech-10: 2,533 images of 10 classes in 4 domains of very different sizes.

    Args:
        root: the folder of the domains, or one that contains it.
        size: height and width that the images are resized to; null for that of the backbone's weights, or 112.
        num_clients: N; the paper has 4, one for each domain.
        test_fraction: share of every domain that is held out, rounded up.
        download: fetch the images into ``root`` if they are not there.
        **options: those of every data module.
    """

    domain_names = ("amazon", "caltech", "dslr", "webcam")
    class_names = (
        "backpack",
        "bike",
        "calculator",
        "headphones",
        "keyboard",
        "laptop_computer",
        "monitor",
        "mouse",
        "mug",
        "projector",
    )
    counts = {
        "amazon": (92, 82, 94, 99, 100, 100, 99, 100, 94, 98),
        "caltech": (151, 110, 100, 138, 85, 128, 133, 94, 87, 97),
        "dslr": (12, 21, 12, 13, 10, 24, 22, 12, 8, 23),
        "webcam": (29, 21, 31, 27, 27, 30, 43, 30, 27, 30),
    }
    mirrors = (  # their digests are not known: what is unpacked is checked by its counts
        Mirror("https://github.com/ChristophRaab/Office_Caltech_DA_Dataset/archive/refs/heads/master.zip"),
        Mirror("https://huggingface.co/datasets/Jemary/FedBN_Dataset/resolve/main/office_caltech_10_dataset.zip"),
    )
    terms = "none were found with the data set, which derives from Office-31 and Caltech-256; use it for research."

    def __init__(
        self,
        root: str | None = None,
        size: int | None = None,
        num_clients: int = 4,
        test_fraction: float = 0.2,
        download: bool = False,
        **options: Unpack[DataOptions],
    ) -> None:
        super().__init__(root, size, num_clients, test_fraction, download, **options)
