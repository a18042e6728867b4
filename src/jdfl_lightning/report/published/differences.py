"""The settings in which a run differs from the paper."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from jdfl_lightning.config import Experiment
from jdfl_lightning.core.settings import declared_settings
from jdfl_lightning.data.base import option_defaults
from jdfl_lightning.report.published import stated_settings

_NOT_IN_PAPER: dict[str, object] = {
    "algorithm.weighting": "samples",
    **{
        setting.name: json.dumps(setting.default) if isinstance(setting.default, list) else setting.default
        for setting in declared_settings(Experiment)
        if not setting.in_paper
    },
    **{f"data.{name}": value for name, value in option_defaults().items()},
}
"""Settings that the paper does not have, with the values that leave them unused."""


def shown(value: object) -> str:
    """Return a setting's value as written in a config.

    >>> shown(None), shown(1.0), shown("B")
    ('null', '1', 'B')
    """
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def differences(
    experiment: str, algorithm: str, settings: Mapping[str, object], alphas: Collection[float]
) -> list[str]:
    """Name the settings that differ from the paper's, with its value.

    Args:
        experiment: the paper's experiment.
        algorithm: name of the algorithm.
        settings: the run's settings by their names in a config, and ``seeds``, their number.
        alphas: the paper's alpha for the run's numbers of pseudo-domains.

    >>> differences("pacs_b", "FedAvg", {"rounds": 3, "supervision.alpha": 0.5, "min_clients": 2}, {0.55})
    ['rounds 3 (paper 150)', 'alpha 0.5 (paper 0.55)', 'min_clients 2 (not in the paper)']
    """
    parts = [
        f"{name.removeprefix('data.').removeprefix('supervision.')} {shown(settings[name])} (paper {shown(value)})"
        for name, value in stated_settings(experiment, algorithm).items()
        if name in settings and settings[name] != value
    ]
    alpha = settings.get("supervision.alpha")
    if alpha is not None and set(alphas) != {alpha}:
        parts.append(f"alpha {shown(alpha)} (paper {' or '.join(map(shown, sorted(alphas)))})")
    parts += [
        f"{name.removeprefix('data.').removeprefix('supervision.')} {shown(settings[name])} (not in the paper)"
        for unused, value in _NOT_IN_PAPER.items()
        for name in settings
        if (name == unused or name.startswith(f"{unused}.")) and settings[name] != value
    ]
    return parts
