"""Joint Domain-Class Federated Learning with PyTorch Lightning.

The names in ``__init__.pyi`` are imported when they are first used, so that importing the joint head imports little
more than torch. Type checkers and editors read the same file.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any


def _read_homes() -> dict[str, str]:
    """Return the module that each public name is imported from."""
    tree = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_HOMES = _read_homes()
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(_HOMES[name])
    return getattr(home, name) if hasattr(home, name) else import_module(f"{home.__name__}.{name}")


def __dir__() -> list[str]:
    return __all__
