"""Tasks, results and counts as groups of named tensors and notes of plain numbers: what any transport can carry."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from jdfl_lightning.client.evaluation import Counts
from jdfl_lightning.core.errors import InputError, plain
from jdfl_lightning.core.messages import FitFailure, FitResult, FitTask
from jdfl_lightning.core.tensors import Record, Tensors

Note = Mapping[str, Any]
"""Names -> numbers, texts, or lists of one kind of them; no bool and no None, which not every transport knows."""


@dataclass(frozen=True)
class Letter:
    """What crosses the wire."""

    tensors: Record = field(default_factory=dict)
    notes: Mapping[str, Note] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """What a site says of itself: no image, no label of one, no true domain."""

    site: int
    """Its number, from 0."""
    own: bool
    """Whether its images are its own; else all sites have the same data set, and share its clients."""
    clients: list[int]
    """Its clients: their ids, or if its images are its own, numbers from 0."""
    sizes: list[int]
    """The number of training images of each."""
    classes: list[str]
    domains: list[str]
    """Names of the groups that it tells accuracies of."""
    held: list[int]
    """The number of held-out images of each of these."""
    fingerprint: str
    version: str
    """Of the packages that decide about bits."""


@dataclass(frozen=True)
class Orders:
    """What a site has to agree with before it does anything."""

    run: str
    """Name of the run, by which it finds its clients' states."""
    site: int
    first: int
    """Id of its first client."""
    fingerprint: str
    """Of the images that it had when the run began."""
    settings: str
    """The run's, as JSON."""


@dataclass(frozen=True)
class Request:
    """What a site is asked to do: fit some of its clients, and judge models on its held-out images."""

    tasks: Sequence[FitTask] = ()
    """Of one round, so that they share weights, buffers, broadcast and table."""
    models: Mapping[str, Tensors] = field(default_factory=dict)
    """Models to judge; one that is the tasks' own weights crosses once."""
    buffers: Tensors = field(default_factory=dict)
    """Of the models to judge."""


@dataclass(frozen=True)
class Answer:
    """What a site answers."""

    results: Sequence[FitResult | FitFailure] = ()
    counts: Mapping[str, Counts] = field(default_factory=dict)
    """For each model that was judged, the images of each domain that were right, and all."""
    seconds: float = 0.0
    """Time that judging took."""


_IMAGES = 2**31
"""More images than anybody has."""
_ENTRIES = 100_000
"""The most clients, classes or domains that a site can have."""
_NAME = 200
"""Letters that the name of a class or a domain can have."""
_LARGEST = 2.0**128
"""Beyond the numbers of single precision: a metric is below, so that means are finite too."""
_METRICS = 16
"""The most metrics, and groups of an upload, that a client has."""
_NUMBERS = [entry.name for entry in fields(FitTask) if entry.name not in ("weights", "buffers", "server", "table")]


def write_facts(facts: Facts) -> Letter:
    """Put a site's facts into a letter."""
    return Letter(notes={"facts": vars(facts) | {"own": int(facts.own)}})


def read_facts(letter: Letter) -> Facts:
    """Take a site's facts out of a letter; raise an `InputError` if it has none that can be."""
    try:
        note = letter.notes["facts"]
        facts = Facts(
            site=_whole(note["site"]),
            own=bool(_whole(note["own"])),
            clients=[_whole(client) for client in _listed(note["clients"])],
            sizes=[_whole(size) for size in _listed(note["sizes"])],
            classes=[_name(name) for name in _listed(note["classes"])],
            domains=[_name(name) for name in _listed(note["domains"])],
            held=[_whole(count) for count in _listed(note["held"])],
            fingerprint=_name(note["fingerprint"]),
            version=_name(note["version"]),
        )
    except Exception as error:  # whatever a site sends
        raise InputError(f"Expected a site to say who it is but it cannot be read: {plain(repr(error))}.") from error
    count = len(facts.clients)
    ids = facts.clients == list(range(count)) if facts.own else len({*facts.clients}) == count
    if not count or not ids or len(facts.sizes) != count or min(facts.sizes) == 0:
        raise InputError("Expected a site with clients of its own, and the number of images of each.")
    names = [f"site{facts.site}"] if facts.own else facts.domains
    distinct = len({*names, "overall", "worst", "spread"}) == len(names) + 3
    if facts.domains != names or not distinct or len(facts.held) != len(names):
        raise InputError("Expected a site with distinct names of what it tells accuracies of, and their images.")
    if not facts.classes or len({*facts.classes}) != len(facts.classes):
        raise InputError("Expected a site with distinct classes.")
    return facts


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _IMAGES:
        raise ValueError(f"no number from 0 to {_IMAGES - 1}")
    return value


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > _ENTRIES:
        raise ValueError(f"no list of at most {_ENTRIES} entries")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or plain(value, _NAME) != value:
        raise ValueError(f"no name of at most {_NAME} printable letters")
    return value


def write_orders(orders: Orders, letter: Letter) -> Letter:
    """Add orders to a letter."""
    return Letter(letter.tensors, {**letter.notes, "orders": vars(orders)})


def read_orders(letter: Letter) -> Orders:
    """Take orders out of a letter."""
    note = letter.notes["orders"]
    return Orders(
        str(note["run"]), int(note["site"]), int(note["first"]), str(note["fingerprint"]), str(note["settings"])
    )


def write_request(request: Request) -> Letter:
    """Put a request into a letter."""
    tensors: Record = {}
    notes: dict[str, Note] = {}
    shared: Tensors = {}
    if request.tasks:
        first = request.tasks[0]
        shared = first.weights
        tensors |= {"weights": first.weights, "buffers": first.buffers}
        tensors |= {f"server.{group}": named for group, named in first.server.items()}
        if first.table is not None:
            tensors["table"] = {"table": first.table}
        for task in request.tasks:
            values = {name: getattr(task, name) for name in _NUMBERS}
            notes[f"task.{task.client}"] = values | {"every_epoch": int(task.every_epoch)}
    for name, weights in request.models.items():
        if weights is not shared:
            tensors[f"model.{name}"] = weights
    if request.models and not (request.tasks and request.buffers is request.tasks[0].buffers):
        tensors["model_buffers"] = request.buffers
    if request.models:
        notes["models"] = {"names": list(request.models)}
    notes["groups"] = {"names": list(tensors)}  # one without tensors may get lost on the way
    return Letter(tensors, notes)


def read_request(letter: Letter) -> Request:
    """Take a request out of a letter."""
    tensors = {name: letter.tensors.get(name, {}) for name in letter.notes["groups"]["names"]}
    server = {name.removeprefix("server."): named for name, named in tensors.items() if name.startswith("server.")}
    table = tensors["table"]["table"] if "table" in tensors else None
    weights, buffers = tensors.get("weights", {}), tensors.get("buffers", {})
    tasks = []
    for name, note in letter.notes.items():
        if name.startswith("task."):
            values: dict[str, Any] = {key: (float if key == "weight" else int)(note[key]) for key in _NUMBERS}
            values["every_epoch"] = bool(values["every_epoch"])
            tasks.append(FitTask(**values, weights=weights, buffers=buffers, server=server, table=table))
    names = letter.notes.get("models", {}).get("names", [])
    models = {name: tensors.get(f"model.{name}", weights) for name in names}
    return Request(tasks, models, tensors.get("model_buffers", buffers) if models else {})


def write_answer(answer: Answer) -> Letter:
    """Put an answer into a letter."""
    tensors: Record = {}
    notes: dict[str, Note] = {}
    for result in answer.results:
        if isinstance(result, FitFailure):
            notes[f"failure.{result.client}"] = {"reason": result.reason}
            continue
        prefix = f"result.{result.client}"
        tensors |= {f"{prefix}.weights": result.weights, f"{prefix}.buffers": result.buffers}
        tensors |= {f"{prefix}.upload.{group}": named for group, named in result.upload.items()}
        notes[prefix] = {
            "num_examples": result.num_examples,
            "num_steps": result.num_steps,
            "weight": result.weight,
            "keeps_state": int(result.keeps_state),
            "upload": list(result.upload),
        }
        notes[f"{prefix}.metrics"] = dict(result.metrics)
    for name, counts in answer.counts.items():
        right, seen = zip(*counts.values(), strict=True)
        notes[f"counts.{name}"] = {"domains": list(counts), "right": list(right), "seen": list(seen)}
    notes["judged"] = {"seconds": answer.seconds}
    return Letter(tensors, notes)


def read_answer(
    letter: Letter, clients: Sequence[int], models: Iterable[str] = (), metrics: Collection[str] = ()
) -> Answer:
    """Take the answer of some clients, and the counts of some models, out of a letter.

    Args:
        letter: the site's.
        clients: those that were asked.
        models: names of those to judge.
        metrics: names of the numbers that clients have to tell; others, and those that are not finite, are left out.

    Raises:
        InputError: if it is not one; counts may be missing.
    """
    try:
        results = [_read_result(letter, client, metrics) for client in clients]
        counts = {}
        for name in models:
            if (note := letter.notes.get(f"counts.{name}")) is not None:
                domains, right, seen = (_listed(note[what]) for what in ("domains", "right", "seen"))
                pairs = [(_whole(one), _whole(all_)) for one, all_ in zip(right, seen, strict=True)]
                if any(one > all_ for one, all_ in pairs):
                    raise ValueError("more images right than there are")
                counts[name] = dict(zip(map(_name, domains), pairs, strict=True))
        seconds = float(letter.notes["judged"]["seconds"])
        if not 0 <= seconds < _IMAGES:
            raise ValueError("no time that judging could take")
        return Answer(results, counts, seconds)
    except Exception as error:  # whatever a site sends
        raise InputError(f"Expected a site's answer but it cannot be read: {plain(repr(error))}.") from error


def _read_result(letter: Letter, client: int, known: Collection[str]) -> FitResult | FitFailure:
    prefix = f"result.{client}"
    if f"failure.{client}" in letter.notes:
        return FitFailure(client, plain(str(letter.notes[f"failure.{client}"]["reason"])))
    note, metrics = letter.notes[prefix], letter.notes.get(f"{prefix}.metrics", {})
    groups = _listed(note["upload"])
    if max(len(groups), len(metrics)) > _METRICS:
        raise ValueError(f"more than {_METRICS} metrics or groups of an upload")
    return FitResult(
        client=client,
        num_examples=_whole(note["num_examples"]),
        num_steps=_whole(note["num_steps"]),
        weight=float(note["weight"]),
        weights=letter.tensors.get(f"{prefix}.weights", {}),
        buffers=letter.tensors.get(f"{prefix}.buffers", {}),
        upload={group: letter.tensors.get(f"{prefix}.upload.{group}", {}) for group in map(_name, groups)},
        metrics={name: float(metrics[name]) for name in metrics if name in known and abs(metrics[name]) < _LARGEST},
        keeps_state=bool(_whole(note["keeps_state"])),
    )
