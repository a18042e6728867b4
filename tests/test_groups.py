"""Unknown domains without federation: the same vectors, to the bit, and the user's things left as they were."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from helpers import digits, every, experiment
from jdfl_lightning import (
    Clustering,
    DigitsDomains,
    GradedTargets,
    HardTargets,
    JointModule,
    PaperCNN,
    discover_domains,
)
from jdfl_lightning.backends.local import LocalRunner
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.clustering.clusters import cluster
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import DISCOVERY_ROUND
from jdfl_lightning.core.seeding import torch_generator
from jdfl_lightning.data.base import DomainDataModule
from jdfl_lightning.data.transforms import to_input
from jdfl_lightning.server.phase1 import collect_updates
from jdfl_lightning.storage.checkpoint import ClientStates


def groups(data: DomainDataModule, **options: Any) -> dict[str, DataLoader[Any]]:
    """Plain loaders of (images, labels), one for each client, with a name that tells its true domain."""
    loaders = {}
    for client, domain in enumerate(data.partition.client_domains):
        chosen = data.partition.clients[client]
        part = TensorDataset(to_input(data.images[chosen]), data.labels[chosen])
        name = f"{data.domain_names[domain]} {client}"
        loaders[name] = DataLoader(part, **({"batch_size": 32, "shuffle": True} | options))
    return loaders


def classifier(size: int = 8, **arguments: Any) -> JointModule:
    torch.manual_seed(0)
    return JointModule(PaperCNN(size), 128, 10, **({"lr": 0.05} | arguments))


@pytest.mark.slow
def test_the_digits_domains_are_found_in_plain_loaders() -> None:
    """The setting of `jdfl-lightning fit`: 16 px, ten groups."""
    data = DigitsDomains(size=16, num_clients=10)
    data.deal(0)
    loaders = groups(data)
    told: list[tuple[str, int, int]] = []
    found = discover_domains(classifier(16), loaders, progress=lambda *step: told.append(step))
    truth = [name.split()[0] for name in loaders]
    assert adjusted_rand_score(truth, list(found.assignments.values())) == 1
    assert list(found.assignments) == found.names == list(loaders)
    assert (found.num_domains, found.found.criterion) == (4, "elbow")
    assert found.vectors.shape == (10, 73856 + 256 + 147584 + 256 + 1290)  # block3 and a head of 10 outputs
    torch.testing.assert_close(found.vectors.norm(dim=1), torch.ones(10))
    assert GradedTargets(found.centroids).num_domains == 4
    assert told == [(name, i, 10) for i, name in enumerate(loaders, start=1)]


class Pairs:
    """A loader without the domains that its batches have."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels, _ in self.loader:
            yield images, labels


@pytest.mark.parametrize("backbone", every(3, ["helpers.batch_norm_net", "PaperCNN", "helpers.dropout_net"]))
def test_the_vectors_of_a_federated_run_to_the_bit(backbone: str) -> None:
    """The same data in the same order, the same seed: the same updates and the same pseudo-domains."""
    run = experiment(
        data=digits(6), backbone=backbone, num_domains=None, clustering=Clustering(epochs=2), seed_everything=3
    )
    workspace = Workspace(run)
    theta_0 = workspace.initial(1)
    runner = LocalRunner(workspace, ClientStates(Path("clients")))
    federated = collect_updates(run, runner, workspace, lambda *_: None, lambda *_: None)
    module = copy.deepcopy(workspace.module(*theta_0))
    loaders = {
        str(client): Pairs(
            run.data.client_loader(client, 0, run.batch_size, torch_generator(3, "shuffle", DISCOVERY_ROUND, client))
        )
        for client in range(6)
    }
    found = discover_domains(module, loaders, epochs=2, seed=3)
    assert torch.equal(found.vectors, federated.vectors)
    options = run.clustering
    expected = cluster(federated, run.num_domains, options.criterion, options.max_domains, run.seed_everything)
    assert torch.equal(found.centroids, expected.centroids)
    assert list(found.assignments.values()) == list(expected.assignments.values())
    assert found.found.inertias == expected.inertias


class Own(pl.LightningModule):
    """Somebody's module: batches are dicts, the optimizer is Adam, transforms draw from everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 10))
        self.net[2].eval()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        noise = random.random() + np.random.rand()
        loss = nn.functional.cross_entropy(self.net(batch["image"] + 0.01 * noise), batch["label"])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def as_dicts(pairs: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    images, labels = zip(*pairs, strict=True)
    return {"image": torch.stack(images), "label": torch.stack(labels)}


def states(loaders: dict[str, DataLoader[Any]]) -> list[Any]:
    numpy = np.random.get_state()[1].tolist()  # type: ignore[index]
    own = [loader.generator.get_state().tolist() for loader in loaders.values() if loader.generator is not None]
    return [torch.get_rng_state().tolist(), random.getstate(), numpy, own]


def test_a_module_of_ones_own_and_nothing_is_touched() -> None:
    module, loaders = Own(), groups(digits(5), collate_fn=as_dicts)
    first, second, *_ = loaders
    for name in (first, second):
        loaders[name] = DataLoader(
            loaders[name].dataset, 16, shuffle=True, collate_fn=as_dicts, generator=torch.Generator().manual_seed(7)
        )
    weights = copy.deepcopy(module.state_dict())
    modes = [part.training for part in module.modules()]
    before = states(loaders)
    results = [discover_domains(module, loaders, 1, ["net.*"], num_domains=2, seed=seed) for seed in (0, 0, 1)]
    assert states(loaders) == before
    assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(weights[name], tensor) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(results[0].vectors, results[1].vectors)
    assert not torch.equal(results[0].vectors, results[2].vectors)
    assert results[0].num_domains == 2


def test_what_cannot_be_used_is_named() -> None:
    loaders = groups(digits(4))
    with pytest.raises(InputError, match="'ink 0' does not: its update is zero"):
        discover_domains(classifier(lr=0.0), loaders)
    with pytest.raises(InputError, match="'ink 0' does not: its update is not finite"):
        discover_domains(classifier(lr=1e30), loaders)
    nothing = DataLoader(TensorDataset(torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.long)))
    with pytest.raises(InputError, match="'empty' does not: it has no batch"):
        discover_domains(classifier(), {"empty": nothing})
    with pytest.raises(InputError, match="0 groups"):
        discover_domains(classifier(), {})
    with pytest.raises(InputError, match="`num_domains` to be between 1 and the number of groups, 4, but got 5"):
        discover_domains(classifier(), loaders, num_domains=5)
    with pytest.raises(InputError, match="Own has no backbone"):
        discover_domains(Own(), loaders)
    with pytest.raises(ValueError, match="the domains matter"):
        discover_domains(classifier(targets=HardTargets(4)), loaders)
