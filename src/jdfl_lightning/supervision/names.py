"""Short names of the supervisions of this package, in the order of tables and figures."""

from __future__ import annotations

from jdfl_lightning.supervision.base import Supervision
from jdfl_lightning.supervision.em import EM
from jdfl_lightning.supervision.graded import Graded
from jdfl_lightning.supervision.hard import Hard
from jdfl_lightning.supervision.online import Online
from jdfl_lightning.supervision.plain import Plain
from jdfl_lightning.supervision.random import Random
from jdfl_lightning.supervision.uniform import Uniform

SUPERVISIONS: tuple[type[Supervision], ...] = (Plain, Hard, Graded, Random, Uniform, EM, Online)


def short_names() -> dict[str, type[Supervision]]:
    """Return the supervisions of this package, by their short names.

    >>> list(short_names())
    ['base', 'hard', 'graded', 'random', 'uniform', 'em', 'online']
    """
    return {known.short: known for known in SUPERVISIONS}


def supervision_name(setting: object) -> str:
    """Return the name of a supervision as a saved config has it: a short name, or a mapping with a ``class_path``.

    >>> supervision_name("graded"), supervision_name({"class_path": "jdfl_lightning.supervision.graded.Graded"})
    ('graded', 'graded')
    >>> supervision_name({"class_path": "mine.Own", "init_args": {}})
    'Own'
    """
    path = str(setting["class_path"] if isinstance(setting, dict) else setting)
    paths = {f"{known.__module__}.{known.__name__}": name for name, known in short_names().items()}
    return paths.get(path, path.rpartition(".")[2])
