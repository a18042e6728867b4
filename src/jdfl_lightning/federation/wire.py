"""Messages of a federation: tasks, results and counts as groups of named tensors and plain values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Annotated, Any, get_type_hints

from annotated_types import Interval, Len
from pydantic import AfterValidator

from jdfl_lightning.client.evaluation import Counts
from jdfl_lightning.config import Experiment, as_dict
from jdfl_lightning.core.errors import InputError, plain
from jdfl_lightning.core.files import checked
from jdfl_lightning.core.messages import FitFailure, FitResult, FitTask
from jdfl_lightning.core.tensors import Record, Tensors
from jdfl_lightning.server.resume import fixed_settings
from jdfl_lightning.server.state import packed, unpacked

Entries = Mapping[str, Any]
"""Names -> numbers, bools, strings, or lists of one of these; no None, which not every transport supports."""
_LARGEST = 2.0**128
"""Limit on a metric, just above single precision, so that means are finite too."""
_METRICS = 16
"""Limit on a client's metrics, and on the groups of its upload."""


def _printable(name: str) -> str:
    if plain(name, 200) != name:
        raise ValueError("no name of at most 200 printable characters")
    return name


_Whole = Annotated[int, Interval(ge=0, lt=2**31)]
"""A number of images, or of something that is not more."""
_Numbers = Annotated[list[_Whole], Len(0, 100_000)]
"""Numbers of a site's clients or domains."""
_Name = Annotated[str, AfterValidator(_printable)]
_Names = Annotated[list[_Name], Len(0, 100_000)]
_Groups = Annotated[list[_Name], Len(0, _METRICS)]
_Seconds = Annotated[float, Interval(ge=0, lt=2**31)]


def _read(kind: Any, note: Entries, name: str) -> Any:
    """Return an entry of a note; raise a ValueError if it is not of a kind."""
    return checked(kind, note[name])


@dataclass(frozen=True)
class Payload:
    """The content of a message."""

    tensors: Record = field(default_factory=dict)
    notes: Mapping[str, Entries] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteInfo:
    """A site's description of itself; it holds no image, no label of an image, no true domain."""

    site: _Whole
    """Its number, from 0."""
    own: bool
    """Whether it has its own images; else all sites have the same data set and share its clients."""
    clients: _Numbers
    """Ids of its clients; numbers from 0 if it has its own images."""
    sizes: _Numbers
    """The number of training images of each client."""
    classes: _Names
    domains: _Names
    """Names of the domains that it reports accuracies for."""
    held: _Numbers
    """The number of held-out images of each domain."""
    fingerprint: _Name
    version: _Name
    """Versions of jdfl-lightning and torch."""


@dataclass(frozen=True)
class RequestHeader:
    """The part of a request that a site checks first."""

    run: str
    """Id of the run, under which the site stores its clients' states."""
    site: int
    first: int
    """Id of the site's first client."""
    fingerprint: str
    """Fingerprint of the site's images when the run began."""
    settings: str
    """The run's settings as JSON."""


@dataclass(frozen=True)
class Request:
    """A request to a site: fit some of its clients, and evaluate models on its held-out images."""

    tasks: Sequence[FitTask] = ()
    """Tasks of one round, which share weights, buffers, broadcast and learned parts."""
    models: Mapping[str, Tensors] = field(default_factory=dict)
    """Models to evaluate; a model equal to the tasks' weights is sent once."""
    buffers: Tensors = field(default_factory=dict)
    """Buffers of the models to evaluate."""


@dataclass(frozen=True)
class Answer:
    """A site's reply to a request."""

    results: Sequence[FitResult | FitFailure] = ()
    counts: Mapping[str, Counts] = field(default_factory=dict)
    """For each evaluated model, the numbers of correct and of all images of each domain."""
    seconds: float = 0.0
    """Time of the evaluation."""


def shared_settings(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that a site must share with the server.

    Where clients train on the features of a frozen network, its weights count by their content, not by their file.
    """
    found = fixed_settings(as_dict(experiment))
    return found | ({"backbone_args.weights": experiment.data.network} if experiment.data.network else {})


_SHARED = ("weights", "buffers", "server", "learned")
_TaskNote: Any = make_dataclass("_TaskNote", [n for n in get_type_hints(FitTask).items() if n[0] not in _SHARED])
"""What a task says besides its tensors."""


def write_info(info: SiteInfo) -> Payload:
    """Write a site's info to a payload."""
    return Payload(notes={"info": vars(info)})


def read_info(payload: Payload) -> SiteInfo:
    """Read a site's info from a payload; raise an `InputError` if it is missing or invalid."""
    try:
        info = checked(SiteInfo, payload.notes["info"])
    except Exception as error:  # whatever a site sends
        raise InputError(f"Expected a site to say who it is but it cannot be read: {plain(repr(error))}.") from error
    count = len(info.clients)
    ids = info.clients == list(range(count)) if info.own else len({*info.clients}) == count
    if not count or not ids or len(info.sizes) != count or min(info.sizes) == 0:
        raise InputError("Expected a site with clients of its own, and the number of images of each.")
    names = [f"site{info.site}"] if info.own else info.domains
    distinct = len({*names, "overall", "worst", "spread"}) == len(names) + 3
    if info.domains != names or not distinct or len(info.held) != len(names):
        raise InputError("Expected a site with distinct names of what it tells accuracies of, and their images.")
    if not info.classes or len({*info.classes}) != len(info.classes):
        raise InputError("Expected a site with distinct classes.")
    return info


def write_request(request: Request, header: RequestHeader | None = None) -> Payload:
    """Write a request, and its header, to a payload."""
    tensors: Record = {}
    notes: dict[str, Entries] = {} if header is None else {"header": vars(header)}
    shared: Tensors = {}
    if request.tasks:
        first = request.tasks[0]
        shared = first.weights
        tensors |= packed(first.weights, first.buffers, server=first.server, learned=first.learned)
        for task in request.tasks:
            notes[f"task.{task.client}"] = {note.name: getattr(task, note.name) for note in fields(_TaskNote)}
    for name, weights in request.models.items():
        if weights is not shared:
            tensors[f"model.{name}"] = weights
    if request.models and not (request.tasks and request.buffers is request.tasks[0].buffers):
        tensors["model_buffers"] = request.buffers
    if request.models:
        notes["models"] = {"names": list(request.models)}
    notes["groups"] = {"names": list(tensors)}  # a transport may drop groups without tensors
    return Payload(tensors, notes)


def read_request(payload: Payload) -> Request:
    """Read a request from a payload."""
    tensors = {name: payload.tensors.get(name, {}) for name in payload.notes["groups"]["names"]}
    weights, buffers = tensors.get("weights", {}), tensors.get("buffers", {})
    server, learned = unpacked(tensors, "server"), unpacked(tensors, "learned")
    asked = [vars(checked(_TaskNote, note)) for name, note in payload.notes.items() if name.startswith("task.")]
    tasks = [FitTask(**note, weights=weights, buffers=buffers, server=server, learned=learned) for note in asked]
    names = payload.notes.get("models", {}).get("names", [])
    models = {name: tensors.get(f"model.{name}", weights) for name in names}
    return Request(tasks, models, tensors.get("model_buffers", buffers) if models else {})


def write_answer(answer: Answer) -> Payload:
    """Write an answer to a payload."""
    tensors: Record = {}
    notes: dict[str, Entries] = {}
    for result in answer.results:
        if isinstance(result, FitFailure):
            notes[f"failure.{result.client}"] = {"reason": result.reason}
            continue
        prefix = f"result.{result.client}"
        own = packed(result.weights, result.buffers, upload=result.upload, learned=result.learned)
        tensors |= {f"{prefix}.{group}": named for group, named in own.items()}
        notes[prefix] = {
            "num_examples": result.num_examples,
            "num_steps": result.num_steps,
            "weight": result.weight,
            "keeps_state": result.keeps_state,
            "upload": list(result.upload),
            "learned": list(result.learned),
        }
        notes[f"{prefix}.metrics"] = dict(result.metrics)
    for name, counts in answer.counts.items():
        right, seen = zip(*counts.values(), strict=True)
        notes[f"counts.{name}"] = {"domains": list(counts), "right": list(right), "seen": list(seen)}
    notes["evaluated"] = {"seconds": answer.seconds}
    return Payload(tensors, notes)


def read_answer(
    payload: Payload, clients: Sequence[int], models: Iterable[str] = (), metrics: Collection[str] = ()
) -> Answer:
    """Read the results of some clients, and the counts of some models, from a payload.

    Args:
        payload: the site's payload.
        clients: the clients of the request.
        models: names of the models to evaluate.
        metrics: names of the metrics that clients report; other metrics and values that are not finite are dropped.

    Raises:
        InputError: if it is not a valid answer; counts may be missing.
    """
    try:
        results = [_read_result(payload, client, metrics) for client in clients]
        counts = {}
        for name in models:
            if (note := payload.notes.get(f"counts.{name}")) is not None:
                pairs = list(zip(_read(_Numbers, note, "right"), _read(_Numbers, note, "seen"), strict=True))
                if any(right > seen for right, seen in pairs):
                    raise ValueError("more images right than there are")
                counts[name] = dict(zip(_read(_Names, note, "domains"), pairs, strict=True))
        seconds = _read(_Seconds, payload.notes["evaluated"], "seconds")
        return Answer(results, counts, seconds)
    except Exception as error:  # whatever a site sends
        raise InputError(f"Expected a site's answer but it cannot be read: {plain(repr(error))}.") from error


def _read_result(payload: Payload, client: int, known: Collection[str]) -> FitResult | FitFailure:
    prefix = f"result.{client}"
    if f"failure.{client}" in payload.notes:
        return FitFailure(client, plain(str(payload.notes[f"failure.{client}"]["reason"])))
    note, metrics = payload.notes[prefix], payload.notes.get(f"{prefix}.metrics", {})
    if len(metrics) > _METRICS:
        raise ValueError(f"more than {_METRICS} metrics")
    return FitResult(
        client=client,
        num_examples=_read(_Whole, note, "num_examples"),
        num_steps=_read(_Whole, note, "num_steps"),
        weight=_read(float, note, "weight"),
        weights=payload.tensors.get(f"{prefix}.weights", {}),
        buffers=payload.tensors.get(f"{prefix}.buffers", {}),
        upload={group: payload.tensors.get(f"{prefix}.upload.{group}", {}) for group in _read(_Groups, note, "upload")},
        learned={name: payload.tensors.get(f"{prefix}.learned.{name}", {}) for name in _read(_Groups, note, "learned")},
        metrics={name: float(metrics[name]) for name in metrics if name in known and abs(metrics[name]) < _LARGEST},
        keeps_state=_read(bool, note, "keeps_state"),
    )
