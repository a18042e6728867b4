"""Features of all images, computed once by a frozen network and kept in the cache like decoded images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from jdfl_lightning.core.tensors import digest_tensors
from jdfl_lightning.data.base import Progress
from jdfl_lightning.data.cache import cache_folder, keep, map_file
from jdfl_lightning.data.transforms import Normalize, to_input

_PASS = 32
"""Images in a forward pass. It is fixed, and a pass has one thread, so that the bits do not depend on the machine's
number of cores."""
_WHAT = "computing features"


_digests: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


def digest_network(network: nn.Module, prefix: str = "") -> str:
    """Return a checksum of a frozen network's tensors, computed once: runs of a suite share the network.

    Args:
        network: the network, which nothing changes.
        prefix: of the names of its tensors.
    """
    known = _digests.setdefault(network, {})
    if prefix not in known:
        known[prefix] = digest_tensors({f"{prefix}{name}": tensor for name, tensor in network.state_dict().items()})
    return known[prefix]


def features_of(
    network: nn.Module,
    images: Tensor,
    normalize: Normalize,
    about: Mapping[str, Any] | None,
    pixels: str,
    progress: Progress,
) -> Tensor:
    """Return the features (N, F) of images (N, H, W, 3), from the cache if it has them.

    Args:
        network: a frozen network, in eval mode.
        images: uint8.
        normalize: how pixels become the network's input.
        about: what decides the network's function besides its tensors, such as its name; None if that is not known, as
            for a network of the user's own, whose code may change: then nothing is read from the cache.
        pixels: checksum of the images.
        progress: called as features are computed.
    """
    if about is None:
        return compute_features(network, images, normalize, progress)
    versions = {name: _version(name) for name in ("torch", "torchvision", "timm")}
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([dict(about), versions, normalize, _PASS], sort_keys=True, default=str).encode())
    digest.update(digest_network(network).encode())
    digest.update(pixels.encode())
    file = cache_folder() / f"{digest.hexdigest()}.features.npy"
    found = map_file(file)
    if found is not None and found.dtype == torch.float32 and len(found) == len(images):
        return found
    return keep(file, compute_features(network, images, normalize, progress).numpy(), "features")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def compute_features(network: nn.Module, images: Tensor, normalize: Normalize, progress: Progress) -> Tensor:
    """Run a network over all images, as many passes at once as torch has threads."""
    threads = torch.get_num_threads()

    def work(start: int) -> Tensor:
        with torch.inference_mode():
            features: Tensor = network(to_input(images[start : start + _PASS], normalize))
        return features.to(torch.float32)

    starts = range(0, len(images), _PASS)
    parts: list[Tensor] = []
    network.to(memory_format=torch.channels_last)
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(work, start) for start in starts]
        try:
            for start, future in zip(starts, futures, strict=True):
                parts.append(future.result())
                progress(_WHAT, min(start + _PASS, len(images)), len(images))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            torch.set_num_threads(threads)
    return torch.cat(parts).clone()  # no tensor of inference mode, which autograd refuses
