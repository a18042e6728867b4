"""A Flower grid without processes: messages go through the bytes of the wire to a ClientApp in this process.

A test that imports it is skipped where Flower cannot be installed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info < (3, 11):
    pytest.skip("flwr needs Python 3.11", allow_module_level=True)

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from jdfl_lightning import Experiment
from jdfl_lightning.config import as_dict
from jdfl_lightning.federation.flower import make_client_app, make_server_app


def over_the_wire(message: Message) -> Message:
    """What the other end sees of a message."""
    return message_from_proto(type(message_to_proto(message)).FromString(message_to_proto(message).SerializeToString()))


class FakeGrid(Grid):
    """Nodes that are there at once and answer at once.

    Args:
        config: of the app. Every node has a process of its own, and so an app of its own.
        nodes: the node-config of each, by id.
        run_config: what `flwr run` was given.
    """

    def __init__(self, config: str, nodes: Mapping[int, Mapping[str, Any]], run_config: Mapping[str, Any]) -> None:
        self.config = config
        self.apps: dict[int, ClientApp] = {}
        self.contexts = {
            node: Context(1, node, dict(config), RecordDict(), dict(run_config)) for node, config in nodes.items()
        }
        self.present = set(nodes)
        self.pushed: list[Message] = []
        self.replies: dict[str, Message] = {}
        self.tamper: Callable[[Message, Message], Message | None] = lambda message, reply: reply
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def contexts_config(self) -> dict[int, dict[str, Any]]:
        """Return the node-config of each node."""
        return {node: dict(context.node_config) for node, context in self.contexts.items()}

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return sorted(self.present)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for number, message in enumerate(messages, start=len(self.pushed)):
            message.metadata.__dict__["_message_id"] = str(number)
            self.pushed.append(message)
            ids.append(str(number))
            reply = self._answer(over_the_wire(message))
            if reply is not None:
                self.replies[str(number)] = over_the_wire(reply)
        return ids

    def _answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        if node not in self.present:
            return Message(Error(5, "Node Unavailable"), reply_to=message)
        if node not in self.apps:
            self.apps[node] = make_client_app(self.config)
        reply = self.apps[node](copy.copy(message), self.contexts[node])
        return self.tamper(message, reply)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(message) for message in message_ids if message in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


def write_config(run: Experiment) -> str:
    """Write settings as a config file, without the backend, which is the grid's."""
    settings = as_dict(run)
    del settings["backend"]
    file = Path("settings.yaml")
    file.write_text(yaml.safe_dump(settings))
    return str(file)


def on_grid(config: str, run_config: Mapping[str, Any], sites: int) -> FakeGrid:
    """Make a grid of sites that share a data set's clients."""
    nodes = {
        100 + site: {"partition-id": site, "num-partitions": sites, "state-dir": str(Path("states").absolute())}
        for site in range(sites)
    }
    return FakeGrid(config, nodes, run_config)


def serve(config: str, grid: FakeGrid, run_config: Mapping[str, Any]) -> None:
    """Run the server's app on a grid."""
    make_server_app(config)(grid, Context(1, 0, {}, RecordDict(), dict(run_config)))


def run_on_grid(config: str, run_config: Mapping[str, Any], sites: int) -> FakeGrid:
    """Run a federation of sites that share a data set's clients."""
    grid = on_grid(config, run_config, sites)
    serve(config, grid, run_config)
    return grid
