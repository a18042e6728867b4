"""The options that all data modules share, as types; their defaults and help are those of `DomainDataModule`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from jdfl_lightning.data.checks import MissingClasses
from jdfl_lightning.data.transforms import Augment, Normalize, Resize

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:
    # For type checkers, **options: Unpack[DataOptions] are keyword arguments. jsonargparse would take them from the
    # TypedDict too, which has no defaults; if it does not see Unpack, it takes them from the signature of the base
    # that they are handed on to.
    Unpack = list


class DataOptions(TypedDict, total=False):
    """Keyword arguments of every data module: ``**options: Unpack[DataOptions]``."""

    augment: Augment | None
    normalize: Normalize | None
    resize: Resize
    val_fraction: float
    unseen: list[str] | str | None
    domain_mix: float
    label_skew: float | None
    missing_classes: MissingClasses
    drop_duplicates: bool
