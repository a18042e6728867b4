"""Flower as the transport of a federation: ServerApp, ClientApp and message conversion; the only import of flwr."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from rich.console import Console
from torch import Tensor

from jdfl_lightning.backends.base import describe
from jdfl_lightning.config import parse_experiment
from jdfl_lightning.federation.members import Transport
from jdfl_lightning.federation.server import fit_federation
from jdfl_lightning.federation.site import SERVER_ONLY, SiteWorker, discreet
from jdfl_lightning.federation.wire import Payload, write_info
from jdfl_lightning.report.run import run_table
from jdfl_lightning.ui.display import open_display

_LOG = logging.getLogger("flwr")


def make_server_app(config: str | Path) -> ServerApp:
    """Return the app of the server, which runs the federation and leaves a run folder where the SuperLink runs.

    ``flwr run --run-config`` overrides settings of the config, with the names of the command line:
    ``'rounds=50 algorithm="SCAFFOLD" run_dir="runs/first" resume="auto"'``.

    Args:
        config: a YAML file, or the name of one that comes with the package.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        experiment = parse_experiment("flwr run", arguments(config, context.run_config))
        console = Console(width=120)
        with open_display(console) as display:
            run = fit_federation(experiment, FlowerTransport(grid), display)
        console.print(run_table(run))
        console.print(f"run folder: {run.folder.absolute()}", highlight=False, soft_wrap=True)

    return app


def make_client_app(config: str | Path) -> ClientApp:
    """Return the app of a site; `SiteWorker` lists the options of its ``--node-config``.

    Args:
        config: the config of the server.
    """
    app = ClientApp()
    workers: dict[str, SiteWorker] = {}  # one, kept for the life of the process

    def reply(message: Message, context: Context, work: Callable[[SiteWorker], Payload]) -> Message:
        key = json.dumps([dict(context.run_config), dict(context.node_config)], sort_keys=True)
        try:
            if key not in workers:
                workers.clear()
                workers[key] = SiteWorker(arguments(config, context.run_config, at_site=True), context.node_config)
            payload = work(workers[key])
        except Exception as error:  # sent as text: Flower's own report of an exception does not help the server's user
            payload = Payload(notes={"error": {"reason": discreet(error)}})
            _LOG.error(describe(error))
        return Message(to_records(payload), reply_to=message)

    @app.query()
    def introduce(message: Message, context: Context) -> Message:
        return reply(message, context, lambda worker: write_info(worker.info))

    @app.train()
    def work(message: Message, context: Context) -> Message:
        return reply(message, context, lambda worker: worker.answer(from_records(message.content), _LOG.info))

    return app


def arguments(config: str | Path, run_config: Mapping[str, Any], at_site: bool = False) -> list[str]:
    """Return settings as command-line arguments; an empty string means not set.

    >>> arguments("digits", {"rounds": 3, "clustering.sketch-dim": 1024, "resume": ""})
    ['--config=digits', '--clustering.sketch_dim=1024', '--rounds=3']
    """
    given = [f"--config={config}"]
    for key, value in sorted(run_config.items()):  # a class before its options; Flower keeps no order
        name = key.replace("-", "_")
        if value != "" and not (at_site and name.partition(".")[0] in SERVER_ONLY):
            given.append(f"--{name}={str(value).lower() if isinstance(value, bool) else value}")
    return given


class FlowerTransport(Transport):
    """Payloads as messages on a Flower grid.

    Args:
        grid: Flower's grid.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> dict[int, str]:
        """Return the connected SuperNodes; their keys are verified if the SuperLink authenticates SuperNodes."""
        return {node.node_id: _ssh_key(node.public_key) for node in self._grid.get_nodes()}

    def send(self, payloads: Mapping[int, Payload], question: bool, seconds: float) -> dict[int, str]:
        """Push a message to each node that accepts one; shared parts are converted and pushed once."""
        known: dict[int, ArrayRecord] = {}
        kind = MessageType.QUERY if question else MessageType.TRAIN
        messages = [Message(to_records(payload, known), node, kind, ttl=seconds) for node, payload in payloads.items()]
        ids = self._grid.push_messages(messages)
        return {node: payload for node, payload in zip(payloads, ids, strict=True) if payload}

    def receive(self, ids: Iterable[str]) -> dict[str, Payload | str]:
        """Pull the replies that have arrived, matched by message id: the reply for a dead node names another node."""
        found: dict[str, Payload | str] = {}
        for message in self._grid.pull_messages(list(ids)):
            answer: Payload | str
            if message.has_error():
                answer = f"Flower says: {message.error.reason or 'error'} (code {message.error.code})"
            else:
                try:
                    answer = from_records(message.content)
                    if "error" in answer.notes:
                        answer = str(answer.notes["error"].get("reason"))
                except Exception as error:  # a site may send anything
                    answer = f"its answer cannot be read: {error!r}"
            found[message.metadata.reply_to_message_id] = answer
        return found


def _ssh_key(pem: bytes) -> str:
    """Return a node's public key in the format of ``ssh-keygen``, in which it was registered."""
    try:
        return load_pem_public_key(pem).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    except (ValueError, UnsupportedAlgorithm):  # no key, or a kind that cannot be registered
        return ""


def to_records(payload: Payload, known: dict[int, ArrayRecord] | None = None) -> RecordDict:
    """Return a payload as Flower's records: an ArrayRecord for a group of tensors, a ConfigRecord for a note.

    Args:
        payload: groups of tensors, and notes.
        known: groups that other payloads share, by identity.
    """
    known = {} if known is None else known
    records: dict[str, Any] = {f"note.{name}": ConfigRecord(dict(note)) for name, note in payload.notes.items()}
    for group, tensors in payload.tensors.items():
        if tensors:
            if id(tensors) not in known:
                known[id(tensors)] = ArrayRecord({name: _to_array(tensor) for name, tensor in tensors.items()})
            records[f"tensors.{group}"] = known[id(tensors)]
    return RecordDict(records)


def from_records(records: RecordDict) -> Payload:
    """Return Flower's records as a payload."""
    tensors = {
        group.removeprefix("tensors."): {name: _to_tensor(array) for name, array in arrays.items()}
        for group, arrays in records.array_records.items()
    }
    notes = {name.removeprefix("note."): dict(note) for name, note in records.config_records.items()}
    return Payload(tensors, notes)


def _to_array(tensor: Tensor) -> Array:
    """Return a tensor as Flower's array; NumPy has no bfloat16, which is sent as its bits."""
    if tensor.dtype != torch.bfloat16:
        return Array(tensor.contiguous().numpy())
    bits = Array(tensor.contiguous().view(torch.int16).numpy())
    return Array("bfloat16", bits.shape, bits.stype, bits.data)


def _to_tensor(array: Array) -> Tensor:
    tensor = torch.from_numpy(array.numpy())
    return tensor.view(torch.bfloat16) if array.dtype == "bfloat16" else tensor
