"""Decode images once, in parallel, into one uint8 array on disk that every later start maps into memory."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import platformdirs
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from jdfl_lightning.core.errors import InputError, notify
from jdfl_lightning.data.base import Progress
from jdfl_lightning.data.transforms import Resize

_FORMAT = "3"  # part of every key: raise it when the decoding changes
MAX_PIXELS = 50_000_000
"""Largest number of pixels of an image; decoding takes some 11 bytes for each, in every thread."""


def cache_folder() -> Path:
    """Return the folder of decoded images: ``JDFL_CACHE`` if set, else the user's cache folder."""
    return Path(os.environ.get("JDFL_CACHE") or platformdirs.user_cache_dir("jdfl-lightning"))


def decode(path: Path, size: int, resize: Resize = "squash") -> np.ndarray:
    """Read an image as RGB of size x size, of its whole area or of its centre; an error names an unreadable image.

    The result depends on the pixels alone, not on the file format: a JPEG is decoded at full size, as scaling in its
    decoder would give sharper images than the resize used for other formats.
    """
    try:
        _stat(path)
    except FileNotFoundError as error:
        raise InputError(f"Expected an image but there is no file {path}.") from error
    except OSError as error:
        raise InputError(f"Expected an image but {path} cannot be read: {error}. Replace or remove it.") from error
    return decode_content(path, path, size, resize)


def decode_content(content: Path | BinaryIO, name: object, size: int, resize: Resize = "squash") -> np.ndarray:
    """Read the content of an image file as `decode` does.

    Args:
        content: a file, or its bytes.
        name: what an error calls it.
        size: height and width.
        resize: how an image becomes a square.
    """
    try:
        with Image.open(content) as image:  # reads the header
            _check_pixels(name, image.width * image.height)
            ImageOps.exif_transpose(image, in_place=True)
            return resized(image, size, resize)
    except InputError:
        raise
    except (OSError, SyntaxError, ValueError, *_BOMB) as error:
        raise InputError(f"Expected an image but {name} cannot be read: {error}. Replace or remove it.") from error


def resized(image: Image.Image, size: int, resize: Resize = "squash") -> np.ndarray:
    """Return an upright image as RGB of size x size."""
    box = None if resize == "squash" else _centre(*image.size)
    return np.asarray(_as_rgb(image).resize((size, size), Image.Resampling.BILINEAR, box, reducing_gap=3.0))


def _centre(width: int, height: int) -> tuple[float, float, float, float]:
    """Return the largest square at the centre of an image: left, top, right, bottom.

    >>> _centre(30, 20)
    (5.0, 0.0, 25.0, 20.0)
    """
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


_BOMB = (Image.DecompressionBombError, Image.DecompressionBombWarning)
"""Pillow's own limit, which is higher than ours but can be lowered."""


def _stat(path: Path) -> os.stat_result:
    """Return the stat of a file; raise an error if it is not regular, as reading it may never end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"Expected an image but {path} is not a regular file. Replace or remove it.")
    return found


def _check_pixels(name: object, count: int) -> None:
    if count > MAX_PIXELS:
        raise InputError(
            f"Expected images of at most {MAX_PIXELS / 1e6:.0f} megapixels but {name} has {count / 1e6:.0f}: make it "
            "smaller, or remove it."
        )


def _as_rgb(image: Image.Image) -> Image.Image:
    """Convert any mode to RGB: 16-bit greys are scaled, transparent pixels become white."""
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image, dtype=np.float64) / 257).clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        paper = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(paper, image.convert("RGBA"))
    return image.convert("RGB")


def file_key(paths: Sequence[Path], size: int, resize: Resize) -> str:
    """Return the cache key: the files, their sizes and dates, the decoding's version and what it was asked for."""
    asked = f"{_FORMAT} {size}" if resize == "squash" else f"{_FORMAT} {size} {resize}"
    digest = hashlib.blake2b(asked.encode(), digest_size=16)
    for path in paths:
        try:
            found = _stat(path)
        except OSError as error:
            raise InputError(f"Expected an image but {path} cannot be read: {error}. Replace or remove it.") from error
        digest.update(os.fsencode(path) + f"\0{found.st_size}\0{found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class ImageFile:
    """Images, or their features, in a file that processes map into memory instead of copying."""

    file: str | int
    """A path; or the descriptor of an open file without a name, which is deleted when the last process closes it."""
    offset: int
    shape: tuple[int, ...]
    dtype: str = "uint8"

    def map(self) -> Tensor:
        """Map the file, copy on write: processes share the pages and cannot change the file."""
        source = self.file if isinstance(self.file, str) else Path(f"/dev/fd/{self.file}")
        images = torch.from_numpy(np.memmap(source, self.dtype, mode="c", offset=self.offset, shape=self.shape))
        _MAPPED[images] = self, images._version
        return images


_MAPPED: MutableMapping[Tensor, tuple[ImageFile, int]] = WeakTensorKeyDictionary()
"""The file of mapped images, with torch's count of in-place changes to them."""


@contextmanager
def image_file(images: Tensor) -> Iterator[ImageFile]:
    """Yield the file that images are mapped from; images in memory are first written to a file without a name."""
    file, version = _MAPPED.get(images, (None, 0))
    if file is not None and images._version == version:
        yield file
        return
    with tempfile.TemporaryFile(prefix="jdfl-images-") as spool:
        values = images.contiguous().numpy()
        values.tofile(spool)
        spool.flush()
        yield ImageFile(spool.fileno(), 0, tuple(images.shape), str(values.dtype))


def map_file(file: Path) -> Tensor | None:
    """Map an array of the cache; None if it is missing or damaged."""
    try:
        values = np.load(file, mmap_mode="r")
        return ImageFile(str(file), values.offset, values.shape, str(values.dtype)).map()
    except (OSError, ValueError, EOFError):
        return None


def keep(file: Path, values: np.ndarray, what: str) -> Tensor:
    """Write an array to the cache, whole or not at all, and map it; if it cannot be written, a note says so.

    Args:
        file: the file.
        values: the array.
        what: what it holds, for the note.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".tmp", delete=False) as aside:
            np.save(aside, values)
        Path(aside.name).replace(file)
    except OSError as error:
        notify(f"The {what} could not be kept in {file.parent}: {error}.")
        return torch.from_numpy(values)
    found = map_file(file)
    return torch.from_numpy(values) if found is None else found


def decode_all(paths: Sequence[Path], size: int, progress: Progress, resize: Resize = "squash") -> Tensor:
    """Return uint8 images (N, size, size, 3), from the cache if it has them.

    Args:
        paths: absolute paths, in the order of the images.
        size: height and width.
        progress: called as the images are decoded.
        resize: how an image becomes a square.
    """
    key = file_key(paths, size, resize)
    return decode_each(key, len(paths), size, lambda position: decode(paths[position], size, resize), progress)


def decode_each(key: str, count: int, size: int, decode_one: Callable[[int], np.ndarray], progress: Progress) -> Tensor:
    """Return uint8 images (N, size, size, 3), from the cache if it has them.

    Args:
        key: the images' name in the cache: a function of all that decides them.
        count: number of the images.
        size: height and width.
        decode_one: decodes the image of a number; called by several threads.
        progress: called as the images are decoded.
    """
    file = cache_folder() / f"{key}.npy"
    found = map_file(file)
    if found is not None:
        return found
    images = np.empty((count, size, size, 3), dtype=np.uint8)

    def work(position: int) -> None:
        images[position] = decode_one(position)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        futures = [pool.submit(work, position) for position in range(count)]
        try:
            for done, future in enumerate(futures, start=1):
                future.result()
                progress("decoding images", done, count)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return keep(file, images, "decoded images")
