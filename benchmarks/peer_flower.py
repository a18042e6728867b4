"""Flower's part of `peers.py`: its simulation, two clients at once in Ray's actors, each with one thread.

What a client does is the hand-written loop's. An actor reads the job and builds the network once, not for every client.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from peer_job import Network, Prepared, Rounds

client_app = ClientApp()


@cache
def _prepared() -> tuple[Prepared, Network]:
    torch.set_num_threads(1)
    job = Prepared.load(os.environ["PEERS_JOB"])
    return job, job.network()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train a client from the server's arrays."""
    job, network = _prepared()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    round, client = message.content["config"]["server-round"], context.node_config["partition-id"]
    count = job.train(network, int(round), int(client))
    metrics = MetricRecord({"num-examples": count})
    return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics}), reply_to=message)


def run(job: Prepared) -> Rounds:
    """Do the job."""
    clients, rounds = job.job.clients, Rounds(job.job.rounds)
    server_app = ServerApp()

    def note(round: int, arrays: ArrayRecord) -> None:
        if round:  # it is called before the first one too
            rounds.note(arrays.to_torch_state_dict)

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        strategy.start(grid, ArrayRecord(job.weights), num_rounds=job.job.rounds, evaluate_fn=note)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0}, "init_args": {"num_cpus": 2}}
    run_simulation(server_app, client_app, num_supernodes=clients, backend_config=resources)
    return rounds
