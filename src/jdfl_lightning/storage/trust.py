"""Trust in run folders: one made by this user on this machine may name any class; any other folder may not.

A run's ``config.yaml`` names classes that are imported when the run is tested or resumed. The first line of the file is
a signature: an HMAC of the rest with a secret that only this user on this machine has, as Jupyter signs notebooks.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import platformdirs

from jdfl_lightning.core.errors import InputError, StorageError, reading
from jdfl_lightning.core.files import parse_settings, read_small, remove_asides, write_whole
from jdfl_lightning.core.system import locked

CONFIG = "config.yaml"
"""The settings of a run, in its folder."""
PACKAGES = ("jdfl_lightning", "torchvision", "timm")
"""Packages whose classes any run folder may name."""
_OPTIMIZERS = "torch.optim."
"""Module of torch's optimizers and schedulers, which any run folder may name too."""
_NETWORKS = ("jdfl_lightning.models.PaperCNN", "jdfl_lightning.models.paper_cnn.PaperCNN")
"""Import paths of this package's network; torchvision's have short names, as its functions may download weights."""
_TIMM = re.compile(r"timm/\w+(\.\w+)?")
"""A network of timm, with a tag or without; other names of timm's are places to fetch a network from."""
_CLASSES = ("data", "algorithm", "supervision")
"""Settings whose value is a class with its arguments."""
_OPTIONAL_CLASSES = ("model", "optimizer", "lr_scheduler", "round_scheduler")
"""Settings whose value is such a class, or null."""
_CLASS_LISTS = ("callbacks", "regularizers")
"""Settings whose value is a list of such classes."""
_TRANSFORM_LIST = "augment"
"""A data module's transforms: classes with their arguments, or names alone; a name without a dot is torchvision's."""
_SIGNATURE = re.compile(rb"# signature: ([0-9a-f]{64})\n")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def _secret() -> bytes | None:
    """Return this user's secret, made when it is first needed; None where it cannot be stored."""
    folder = platformdirs.user_data_path("jdfl-lightning")
    file = folder / "trust.key"
    try:
        if not file.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(folder):
                if not file.exists():  # no other process was faster
                    remove_asides(folder)
                    write_whole(file, secrets.token_bytes(32), private=True)
        secret = file.read_bytes()
        return secret if len(secret) == 32 else None
    except (OSError, StorageError):
        return None


def sign(text: bytes) -> bytes:
    """Return the text of a ``config.yaml`` with this user's signature in front."""
    secret = _secret()
    return text if secret is None else b"# signature: %s\n" % hmac.digest(secret, text, "sha256").hex().encode() + text


def _is_signed(content: bytes) -> bool:
    found, secret = _SIGNATURE.match(content), _secret()
    if found is None or secret is None:
        return False
    return hmac.compare_digest(hmac.digest(secret, content[found.end() :], hashlib.sha256).hex().encode(), found[1])


def _read(folder: Path) -> tuple[dict[str, Any], bool]:
    """Return the settings of a run folder, and whether they have a valid signature of this user."""
    with reading("the settings of a run", folder / CONFIG):
        content = read_small(folder / CONFIG)
        return parse_settings(content.decode()), _is_signed(content)


def own_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a run folder that this user made on this machine; empty for any other folder."""
    try:
        settings, own = _read(folder)
    except StorageError:
        return {}
    return settings if own else {}


def _check_groups(settings: dict[str, Any], known: Mapping[str, Any]) -> None:
    """Raise a ValueError if a group of settings is not a mapping."""
    for name, value in settings.items():
        default = known.get(name)
        if isinstance(default, dict) and "class_path" not in default and not isinstance(value, dict):
            raise ValueError(f"{name} is no group of settings")  # the parser would read a string as a file name


def _check_form(settings: dict[str, Any], known: Mapping[str, Any]) -> None:
    """Raise a ValueError unless settings have the form that a run writes; the parser would accept many others."""
    for name, value in settings.items():
        if name not in known:  # a dotted name would set a nested setting, `config` would load another file
            raise ValueError(f"there is no setting {name!r}")
        a_class = name in _CLASSES or (name in _OPTIONAL_CLASSES and value is not None)
        if a_class and not _is_class(value):
            raise ValueError(f"{name} is no class_path with init_args")
        if name in _CLASS_LISTS and not (isinstance(value, list) and all(map(_is_class, value))):
            raise ValueError(f"{name} is no list of class_paths with init_args")
    callbacks = settings.get("trainer", {}).get("callbacks", [])
    if not (isinstance(callbacks, list) and all(map(_is_class, callbacks))):
        raise ValueError("trainer.callbacks is no list of class_paths with init_args")
    criterion = settings.get("clustering", {}).get("criterion", "elbow")
    if not _is_class(criterion) and not str(criterion).isidentifier():  # a short name, as earlier runs wrote it
        raise ValueError("clustering.criterion is no class_path with init_args")
    for key, value in _entries(settings):
        if not isinstance(key, str) or not key.isidentifier():
            raise ValueError(f"{key!r} is no name of a setting")
        if isinstance(value, str) and key in ("init_args", _TRANSFORM_LIST):  # the parser would read it as YAML
            raise ValueError(f"{key} is a text")


def _is_class(value: object) -> bool:
    return isinstance(value, dict) and set(value) <= {"class_path", "init_args"}


def _entries(settings: Any) -> Iterator[tuple[object, Any]]:
    for value in settings.values() if isinstance(settings, dict) else settings if isinstance(settings, list) else ():
        yield from _entries(value)
    yield from settings.items() if isinstance(settings, dict) else ()


def _strangers(settings: dict[str, Any]) -> Iterator[str]:
    """Yield the classes named in settings that are from no known package, or are no names."""
    backbone = settings.get("backbone")
    if backbone is not None and not known_backbone(backbone):
        yield str(backbone)
    for path in _class_paths(settings):
        if not _belongs(path):
            yield str(path)


def _class_paths(settings: Any) -> Iterator[Any]:
    if isinstance(settings, dict):
        for key, value in settings.items():
            if key == "class_path":
                yield value
            elif key == _TRANSFORM_LIST and isinstance(value, list):
                named = [*(item for item in value if isinstance(item, str)), *_class_paths(value)]
                yield from (path for path in named if not (isinstance(path, str) and path.isidentifier()))
            else:
                yield from _class_paths(value)
    elif isinstance(settings, list):
        for value in settings:
            yield from _class_paths(value)


def _belongs(path: object) -> bool:
    if not isinstance(path, str) or not _IMPORT_PATH.fullmatch(path):
        return False
    return path.partition(".")[0] in PACKAGES or path.startswith(_OPTIMIZERS)


def known_backbone(name: object) -> bool:
    """Return whether a backbone is from one of the known packages.

    >>> known_backbone("resnet18"), known_backbone("timm/resnet18"), known_backbone("os.system")
    (True, True, False)
    """
    if not isinstance(name, str):
        return False
    return name.isidentifier() or name in _NETWORKS or _TIMM.fullmatch(name) is not None


def saved_settings(folder: Path) -> dict[str, Any]:
    """Read the settings of a run folder for display or comparison; use `settings_to_use` to build a run from them."""
    return _read(folder)[0]


def settings_to_use(folder: Path, trust: bool, known: Mapping[str, Any], places: Iterable[str]) -> dict[str, Any]:
    """Return the settings of a run folder that may be used; raise an `InputError` that names what would be imported.

    Args:
        folder: the run folder.
        trust: whether the user trusts the folder, whoever made it.
        known: all settings with their defaults.
        places: names of the settings for where a run works and what it writes; not used from another user's folder.
    """
    settings, own = _read(folder)
    try:
        _check_groups(settings, known)
        if trust or own:
            return settings
        for name in places:
            group, _, inner = name.partition(".")
            if not inner:
                settings.pop(group, None)
            elif group in settings:
                settings[group].pop(inner, None)
        data = settings.get("data")
        if isinstance(data, dict) and isinstance(arguments := data.get("init_args"), dict):
            arguments.pop("download", None)
        if isinstance(settings.get("backbone_args"), dict):
            settings["backbone_args"].pop("weights", None)  # a file to read, or to fetch
        _check_form(settings, known)
    except ValueError as error:
        raise StorageError(f"Expected the settings of a run but {folder / CONFIG} has others: {error}.") from error
    require_known(folder, list(dict.fromkeys(_strangers(settings))))
    return settings


def require_known(folder: Path, strangers: list[str]) -> None:
    """Raise an `InputError` if a folder that this user did not make names classes of unknown packages."""
    if strangers:
        raise InputError(
            f"{folder} was not made by you on this machine, or was edited, and names {', '.join(strangers[:5])}, "
            "which would be imported and run. If you trust whoever made it, and that code, pass --trust true."
        )
