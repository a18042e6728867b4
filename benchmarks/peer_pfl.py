"""The part of pfl-research in `peers.py`: its simulation, in one process, or in two that share the clients.

pfl finds the other process by its own variables PFL_WORKER_ADDRESSES and PFL_WORKER_RANK.
"""

from __future__ import annotations

import itertools

import torch
from peer_job import BATCH, Prepared, Rounds
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor


def _no_evaluation(*batch: Tensor) -> dict[str, Weighted]:
    """Stand in for the evaluation that pfl makes in its first round."""
    return {"images": Weighted.from_unweighted(1)}


class _Clock(TrainingProcessCallback):
    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.rounds.note(lambda: model.variable_map)
        return False, Metrics()


def run(job: Prepared) -> Rounds:
    """Do the job."""
    network, clients, rounds = job.network(), job.job.clients, Rounds(job.job.rounds)
    here = clients // pytorch_ops.distributed.world_size  # of a round's clients
    asked = itertools.count()

    def images_of(client: int) -> Dataset:
        order = job.orders[next(asked) // here][client]
        return Dataset((job.images[order], job.labels[order]))

    network.metrics = _no_evaluation
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),  # the mean of the models is the new model
        amp_dtype=torch.bfloat16 if job.job.bf16 else None,
    )
    data = FederatedDataset(images_of, itertools.cycle(range(clients)).__next__)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds.total,
            evaluation_frequency=rounds.total,
            train_cohort_size=clients,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=job.job.lr, local_batch_size=BATCH),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[_Clock(rounds)],
        send_metrics_to_platform=False,
    )
    return rounds
