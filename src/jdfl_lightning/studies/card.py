"""The card of a model: what it is, how it was trained, how well it does, and what that does not say."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from jdfl_lightning.storage.folder import SavedRun
from jdfl_lightning.storage.names import DOMAIN_PREFIX, Which
from jdfl_lightning.storage.weights import ModelHeader

_SHOWN = (
    *("seed_everything", "rounds", "client_fraction", "epochs", "batch_size", "lr", "momentum", "weight_decay"),
    *("num_domains", "head_init"),
)
"""Settings that are listed, where a run has them."""
_DATA = ("num_clients", "test_fraction", "val_fraction", "unseen", "domain_mix", "label_skew", "drop_duplicates")


def model_card(header: ModelHeader, run: SavedRun, which: Which) -> str:
    """Return the card as Markdown, with the front matter that model hubs read.

    Args:
        header: description of the model.
        run: the run that it comes from.
        which: which of the run's weights it has.
    """
    config, row = run.config, run.ends[which]
    data = config.get("data", {})
    arguments = data.get("init_args", {}) if isinstance(data, dict) else {}
    name, algorithm, supervision = (_class(config.get(key)) for key in ("data", "algorithm", "supervision"))
    found = run.discovery
    pseudo = "" if found is None else f" {found['num_domains']} pseudo-domains were found among the clients."
    protocol = [("data", name), *((key, arguments[key]) for key in _DATA if key in arguments)]
    protocol += [("algorithm", algorithm), ("supervision", supervision)]
    protocol += [(key, config[key]) for key in _SHOWN if config.get(key) is not None]
    accuracies = {"all domains": row["test/acc"], "the worst domain": row["test/acc_worst"]}
    accuracies |= {
        key.removeprefix(DOMAIN_PREFIX): value for key, value in row.items() if key.startswith(DOMAIN_PREFIX)
    }
    how = "largest of its outputs" if header.score == "max" else "sum of its probabilities"
    front = ["---", "library_name: jdfl-lightning", "pipeline_tag: image-classification"]
    front += ["tags:", *(f"- {tag}" for tag in ("federated-learning", "domain-shift", "jdfl")), "---"]
    text = [
        *front,
        f"# {_plain(name)}: {len(header.class_names)} classes, {_plain(header.backbone)}",
        f"An image classifier trained with Joint Domain-Class Federated Learning.{pseudo}",
        "```python\n"
        "from jdfl_lightning import from_pretrained, predict\n\n"
        "model = from_pretrained(FOLDER_OR_ID)\n"
        "print(predict(model, IMAGES))\n"
        "```",
        f"Classes: {', '.join(map(_plain, header.class_names))}.",
        f"Images become {header.size} x {header.size} pixels ({header.resize}), normalised as `{header.normalize}`. A "
        f"class is predicted by the {how} over the pseudo-domains; its probability is the sum.",
        "## Training",
        _table(("setting", "value"), protocol),
        "## Results",
        f"Accuracy on held-out images of the same domains, after round {int(row['round'])} of {len(run.rows)}.",
        _table(("domain", "accuracy"), [(key, _percent(value)) for key, value in accuracies.items()]),
        "## Limits",
        "\n".join(f"- {limit}" for limit in _limits(header, run, which)),
    ]
    return "\n\n".join(["\n".join(text[: len(front)]), *text[len(front) :]]) + "\n"


def _limits(header: ModelHeader, run: SavedRun, which: Which) -> Iterable[str]:
    if which == "best" and run.keeps_best:
        yield "The round was picked by these same held-out images, so that the accuracy is flattered."
    yield "One run, with one seed: other seeds give other numbers."
    yield "Other domains and other things were not tested: the network names one of its classes for any image."
    yield "Clients were simulated, or held by sites of one federation; what they hold decides what the network knows."
    epsilon = next((value for key, value in run.last.items() if key.endswith("epsilon")), None)
    if epsilon is not None and math.isfinite(epsilon):
        yield f"Client-level differential privacy with epsilon {epsilon:.3g}."
    else:
        yield "No differential privacy: weights may reveal something of the training images."
    if header.backbone != "PaperCNN":
        yield f"The network {_plain(header.backbone)} may have been pretrained: its weights have terms of their own."


def _class(value: Any) -> str:
    """Return the name of a class of the settings, with its arguments where they are plain."""
    if not isinstance(value, dict):
        return str(value)
    return str(value.get("class_path", "")).rpartition(".")[2]


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.2f} %"


def _table(titles: tuple[str, str], rows: Iterable[tuple[str, Any]]) -> str:
    lines = [f"| {titles[0]} | {titles[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {_plain(key)} | {_plain(value)} |" for key, value in rows)])


def _plain(value: Any) -> str:
    r"""Return a value as text that Markdown shows as it is.

    >>> _plain("a|b_c"), _plain(None)
    ('a\\|b\\_c', 'none')
    """
    text = "none" if value is None else " ".join(str(value).split())
    return "".join(f"\\{letter}" if letter in r"\`*_{}[]<>#|!" else letter for letter in text)
