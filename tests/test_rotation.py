"""Phase 1 without class labels: images are turned, and the angle is the label."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import contents, digits, discovered, examples, experiment, same
from jdfl_lightning import Clustering, PoolBackend, fit
from jdfl_lightning.client.fit import Workspace, fit_client
from jdfl_lightning.client.probe import turn
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import DISCOVERY_ROUND, FitTask
from jdfl_lightning.core.seeding import torch_generator
from jdfl_lightning.models import build_backbone
from test_discovery import LATE, CutAt, CutError

ROTATIONS = Clustering(epochs=1, labels="rotations")


def update(clustering: Clustering, labels: torch.Tensor | None = None) -> torch.Tensor:
    """What client 1 sends in Phase 1, with other labels for all images if they are given."""
    data = digits()
    if labels is not None:
        data.labels = labels
    workspace = Workspace(experiment(data=data, clustering=clustering))
    task = FitTask(1, DISCOVERY_ROUND, 0, *workspace.initial(1))
    return fit_client(workspace, task, {})[0].upload["update"]["u"]


@examples(50)
@given(count=st.integers(1, 11), side=st.integers(1, 5), num_classes=st.integers(1, 12), seed=st.integers(0, 99))
def test_images_are_turned_as_their_labels_say(count: int, side: int, num_classes: int, seed: int) -> None:
    """As NumPy turns one image at a time; the batch itself is unchanged, and angles differ in number by one at most."""
    images = torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed))
    before = images.clone()
    turned, labels = turn(images, num_classes)
    assert torch.equal(images, before)
    for image, after, label in zip(images.numpy(), turned.numpy(), labels.tolist(), strict=True):
        assert np.array_equal(after, np.stack([np.rot90(channel, label) for channel in image]))
    frequencies = np.bincount(labels.numpy(), minlength=min(4, num_classes))
    assert len(frequencies) == min(4, num_classes)
    assert frequencies.max() - frequencies.min() <= 1


def test_an_update_cannot_know_the_classes() -> None:
    """To the bit the same, whatever the labels are; with the labels as they are, it depends on them."""
    others = torch.zeros_like(digits().labels)
    assert torch.equal(update(ROTATIONS), update(ROTATIONS, others))
    assert not torch.equal(update(Clustering(epochs=1)), update(Clustering(epochs=1), others))
    assert not torch.equal(update(Clustering(epochs=1)), update(ROTATIONS))


def test_phase_1_is_plain_sgd_on_angles() -> None:
    """The same mathematics written out: shuffled batches, the i-th image turned i mod 4 times, cross-entropy."""
    run = experiment(clustering=ROTATIONS, batch_size=32, lr=0.1)
    workspace = Workspace(run)
    weights, buffers = workspace.initial(1)
    result = fit_client(workspace, FitTask(1, DISCOVERY_ROUND, 0, weights, buffers), {})[0]

    net, head = build_backbone("helpers.tiny_net", 8), torch.nn.Linear(12, 10)
    net.load_state_dict({n.removeprefix("backbone."): t for n, t in weights.items() if n.startswith("backbone")})
    head.load_state_dict({n.removeprefix("head."): t for n, t in weights.items() if n.startswith("head")})
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
    indices = run.data.partition.clients[1]
    order = indices[torch.randperm(len(indices), generator=torch_generator(0, "shuffle", DISCOVERY_ROUND, 1))]
    for batch in order.split(32):
        pixels = [np.rot90(run.data.images[number].numpy(), place % 4) for place, number in enumerate(batch)]
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 127.5 - 1
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head(net(images)), torch.arange(len(batch)) % 4).backward()
        optimizer.step()
    after = {f"backbone.{n}": p for n, p in net.named_parameters()} | {
        f"head.{n}": p for n, p in head.named_parameters()
    }
    chosen = [name for name in weights if name.startswith(("backbone.1.", "head."))]  # B: last conv block and head
    moved = torch.cat([(after[name].detach() - weights[name]).flatten() for name in chosen])
    torch.testing.assert_close(result.upload["update"]["u"], moved / moved.norm(), atol=1e-5, rtol=1e-4)
    assert (result.num_examples, result.num_steps) == (len(indices), -(-len(indices) // 32))


def test_phase_2_trains_on_the_classes() -> None:
    """A round's fit does not depend on the labels of Phase 1."""
    results = []
    for clustering in (Clustering(epochs=1), ROTATIONS):
        workspace = Workspace(experiment(clustering=clustering, supervision="base"))
        results.append(fit_client(workspace, FitTask(1, 1, 0, *workspace.initial(1)), {})[0].weights)
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


@pytest.mark.slow
def test_newcomers_a_restart_and_a_pool() -> None:
    """Sketches, clients that come later, a run that was cut off, and workers: the same to the bit."""
    late: dict[str, Any] = LATE | {
        "clustering": Clustering(epochs=1, fraction=0.5, sketch_dim=64, newcomers="update", labels="rotations")
    }
    whole = fit(experiment(data=digits(8), run_dir="whole", **late))
    assert whole.last["joined"] > 0
    with pytest.raises(CutError):
        fit(experiment(data=digits(8), run_dir="cut", **late), CutAt(2))
    fit(experiment(data=digits(8), resume="cut", **late))
    assert contents("cut") == contents("whole")
    fit(experiment(data=digits(8), run_dir="pool", backend=PoolBackend(workers=2, threads=1), **late))
    assert same("pool", "whole")
    fit(experiment(data=digits(8), run_dir="classes", **LATE))
    assert not same("classes", "whole")


def test_another_discovery_is_refused() -> None:
    folder = str(discovered("found"))
    with pytest.raises(InputError, match=r"--clustering\.labels to be 'classes'"):
        fit(experiment(discovery=folder, clustering=ROTATIONS))


def test_other_labels_are_refused() -> None:
    with pytest.raises(InputError, match=r"--clustering\.labels to be .*rotations.* but got 'colours'"):
        Clustering(labels="colours")  # type: ignore[arg-type]
