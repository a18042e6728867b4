"""PrivateFedAvg: its noise, its sample and its budget, and what is refused as it would make the guarantee false."""

from __future__ import annotations

import hashlib
import math
import secrets
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest
from torch import Tensor, nn

from helpers import Watched, checkered, contents, digits, examples, experiment, tiny_net
from jdfl_lightning import Experiment, PrivateFedAvg, RunCallback, fit
from jdfl_lightning.algorithms.privacy import KEY_BYTES, STEPS, gaussian, keyed_bytes, secret_sample, spent_epsilon
from jdfl_lightning.cli import main
from jdfl_lightning.client.fit import Workspace
from jdfl_lightning.config import Checkpointing
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import FitFailure, FitResult, RoundContext
from jdfl_lightning.core.seeding import sample_clients
from jdfl_lightning.core.tensors import Record, norm, sub
from jdfl_lightning.report.collect import read_runs
from jdfl_lightning.server.events import Events
from jdfl_lightning.server.rounds import Rounds
from jdfl_lightning.server.state import ServerState
from jdfl_lightning.storage.checkpoint import ClientStates
from jdfl_lightning.storage.folder import read_run
from jdfl_lightning.storage.records import load_record
from test_screening import play

KEY = bytes(range(KEY_BYTES))


def server(key: bytes = KEY) -> Record:
    return {"secret": {"key": torch.tensor(list(key), dtype=torch.uint8)}}


def context(number: int = 1, asked: int = 5, attempt: int = 0) -> RoundContext:
    return RoundContext(number, num_clients=100, asked=asked, attempt=attempt)


def answer(client: int, weights: Tensor, num_examples: int = 1) -> FitResult:
    return FitResult(client, num_examples, 1, weights={"w": weights})


def mean(
    algorithm: PrivateFedAvg, theta: Tensor, results: Iterable[FitResult], where: RoundContext, key: bytes = KEY
) -> Tensor:
    """The weights after a round with one parameter."""
    return algorithm.aggregate({"w": theta}, server(key), iter(list(results)), where)[0]["w"]


def private(**changes: Any) -> Experiment:
    return experiment(**({"supervision": "base", "algorithm": PrivateFedAvg()} | changes))


# --- the mean


def test_the_mean_by_hand() -> None:
    """C = 1: updates of length 5 and 0.5 become 1 and 0.5 long, over the 4 that were asked; hardly any noise."""
    theta = torch.tensor([1.0, 1.0], dtype=torch.float64)
    results = [
        answer(0, theta + torch.tensor([3.0, 4.0], dtype=torch.float64), num_examples=100),
        answer(1, theta + torch.tensor([0.0, 0.5], dtype=torch.float64)),
    ]
    quiet = PrivateFedAvg(clip_norm=1.0, noise_multiplier=1e-12)
    torch.testing.assert_close(
        mean(quiet, theta, results, context(asked=4)), torch.tensor([1 + 0.6 / 4, 1 + 1.3 / 4], dtype=torch.float64)
    )


@examples(30)
@given(scale=st.floats(0, 1e4), seed=st.integers(0, 50))
def test_one_client_moves_the_mean_by_at_most_two_clips(scale: float, seed: int) -> None:
    """The sensitivity that the accountant is told: 2 C / count, whatever one client sends instead; hardly any noise."""
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(20, generator=generator, dtype=torch.float64)
    others = [answer(i, torch.randn(20, generator=generator).double()) for i in range(3)]
    one, two = (answer(9, scale * torch.randn(20, generator=generator).double()) for _ in "ab")
    quiet = PrivateFedAvg(clip_norm=0.7, noise_multiplier=1e-12)
    means = [mean(quiet, theta, [*others, it], context(asked=4)) for it in (one, two)]
    assert norm(sub({"w": means[0]}, {"w": means[1]})) <= 2 * 0.7 / 4 + 1e-9


def test_updates_and_noise_are_on_one_grid() -> None:
    """The sum is a whole number of steps, in any order of the clients, and no update is longer than before."""
    generator = torch.Generator().manual_seed(0)
    results = [answer(i, torch.randn(1000, generator=generator)) for i in range(5)]
    algorithm, theta = PrivateFedAvg(clip_norm=2.0, noise_multiplier=1.5), torch.zeros(1000, dtype=torch.float64)
    step = 1.5 * 2.0 / STEPS
    forth, back = (mean(algorithm, theta, order, context(asked=1)) for order in (results, results[::-1]))
    assert torch.equal(forth, back)
    steps = forth / step
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-6)
    assert (steps.numpy() - _sum(results, step)).std() == pytest.approx(STEPS, rel=0.1)
    assert np.linalg.norm(_sum(results[:1], step)) * step <= 2.0


def _sum(results: list[FitResult], step: float) -> np.ndarray:
    """The clipped updates in steps, rounded towards zero one by one: C = 2."""
    total = np.zeros(1000)
    for result in results:
        update = result.weights["w"].double().numpy()
        total += np.trunc(update * min(1.0, 2.0 / np.linalg.norm(update)) / step)
    return total


# --- the noise


def test_noise_has_the_deviation_asked_for() -> None:
    theta, algorithm = torch.zeros(200_000), PrivateFedAvg(clip_norm=2.0, noise_multiplier=1.5)
    noisy = [mean(algorithm, theta, [], context(number)) for number in (1, 2)]
    assert noisy[0].std().item() == pytest.approx(1.5 * 2.0 / 5, rel=0.01)
    assert noisy[0].mean().item() == pytest.approx(0, abs=0.01)
    assert torch.corrcoef(torch.stack(noisy))[0, 1].abs() < 0.02  # another draw in every round


def test_noise_is_gaussian() -> None:
    """By Kolmogorov and Smirnov, over more than one block; squares and neighbours are uncorrelated."""
    numbers = gaussian(KEY, 600_001, "here")
    assert len(numbers) == 600_001
    assert kstest(numbers, "norm").pvalue > 0.01
    for values in (numbers, numbers**2):
        for lag in (1, 1 << 17, 1 << 18):  # neighbours, the two of a pair, the same place of two blocks
            assert abs(np.corrcoef(values[lag:], values[:-lag])[0, 1]) < 0.01
    assert 4.5 < np.abs(numbers).max() < 6
    assert np.array_equal(numbers, gaussian(KEY, 600_001, "here"))


def test_the_radius_is_fine_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extreme words give sqrt(2 ln 2^65) and sqrt(2 / 2^65): neither infinite nor exactly 0."""
    for word, radius in ((0, math.sqrt(130 * math.log(2))), (2**64 - 1, 2.0**-32), (2**63, math.sqrt(2 * math.log(2)))):
        stream = word.to_bytes(8, "little") + bytes(8)
        monkeypatch.setattr("jdfl_lightning.algorithms.privacy.keyed_bytes", lambda *_, stream=stream: stream)
        assert gaussian(KEY, 1).tolist() == [pytest.approx(radius, rel=1e-12)]


def test_every_bit_of_the_key_counts() -> None:
    """256 keys that differ in one bit, upper ones too: noise and sample are unrelated to those of the first."""
    first, samples = gaussian(KEY, 2000), {tuple(secret_sample(KEY, 1000, 500))}
    for bit in range(8 * KEY_BYTES):
        other = (int.from_bytes(KEY, "big") ^ 1 << bit).to_bytes(KEY_BYTES, "big")
        assert abs(np.corrcoef(first, gaussian(other, 2000))[0, 1]) < 0.12
        samples.add(tuple(secret_sample(other, 1000, 500)))
    assert len(samples) == 1 + 8 * KEY_BYTES
    with pytest.raises(ValueError, match="32 bytes but got 4"):
        keyed_bytes(b"1234", 8, "noise")


def test_the_stream_is_shake_256_of_key_purpose_and_place() -> None:
    assert keyed_bytes(KEY, 40, "noise", 1, "w") == hashlib.shake_256(KEY + b'["noise", 1, "w"]').digest(40)
    places: list[tuple[str | int, ...]] = [("a", 1), ("a", "1"), ("a1",), ("a", 1, ""), ("b", 1), ("", "a", 1)]
    assert len({keyed_bytes(KEY, 16, "noise", *place) for place in places}) == len(places)
    assert keyed_bytes(KEY, 16, "noise", 1) != keyed_bytes(KEY, 16, "sample", 1)


def guess_seed(released: Tensor, deviation: float, seeds: Iterable[int]) -> int | None:
    """Attack noise: subtract what torch draws from each seed, and look whether little is left."""
    for seed in seeds:
        left = (
            released - deviation * torch.randn(released.shape, generator=torch.Generator().manual_seed(seed)).double()
        )
        if left.std() < 0.5 * deviation:
            return seed
    return None


def test_noise_cannot_be_found_by_guessing_seeds() -> None:
    """The attack works against torch's noise, of whose 63-bit seed it needs 32 bits; here 12 of these are unknown."""
    count, deviation = 400, 1.0 / 4
    theta = torch.zeros(count, dtype=torch.float64)
    update = torch.full((count,), 1 / math.sqrt(count), dtype=torch.float64)
    secret = (secrets.randbits(31) << 32) + secrets.randbelow(4096)
    torch_noise = torch.randn(count, generator=torch.Generator().manual_seed(secret)).double()
    assert guess_seed(update / 4 + deviation * torch_noise, deviation, range(4096)) == secret % 2**32
    released = mean(PrivateFedAvg(), theta, [answer(0, update)], context(asked=4), secrets.token_bytes(KEY_BYTES))
    assert guess_seed(released, deviation, range(4096)) is None


def test_a_repeated_round_has_the_same_noise_for_the_same_answers_alone() -> None:
    """Client 1 fails when a round is repeated: the difference of the two models is as noisy as either."""
    theta, algorithm = torch.zeros(20_000), PrivateFedAvg()
    generator = torch.Generator().manual_seed(0)
    results = [answer(i, torch.randn(20_000, generator=generator)) for i in range(3)]
    whole = mean(algorithm, theta, results, context())
    assert torch.equal(whole, mean(algorithm, theta, results, context()))
    silent = answer(7, theta)  # an update of zero: the sum is the same, and who answered is not
    others = {
        "without client 1": mean(algorithm, theta, [results[0], results[2]], context()),
        "one more": mean(algorithm, theta, [*results, silent], context()),
        "another attempt": mean(algorithm, theta, results, context(attempt=1)),
        "another round": mean(algorithm, theta, results, context(2)),
        "another key": mean(algorithm, theta, results, context(), bytes(KEY_BYTES)),
    }
    for name, other in others.items():
        assert (whole - other).std().item() == pytest.approx(math.sqrt(2) / 5, rel=0.05), name
    both = algorithm.aggregate({"a": theta, "b": theta}, server(), iter([]), context())[0]
    assert (both["a"] - both["b"]).std().item() == pytest.approx(math.sqrt(2) / 5, rel=0.05)  # parameters share none


# --- the sample


def watch(algorithm: PrivateFedAvg, folder: str, **changes: Any) -> Watched:
    """Run rounds with half of 4 clients; return what the clients were sent."""
    run = private(algorithm=algorithm, client_fraction=0.5, **changes)
    workspace = Workspace(run)
    weights, buffers = workspace.initial(1)
    runner = Watched(workspace, ClientStates(Path(folder)))
    Rounds(run, runner, Events(RunCallback())).run(ServerState(0, weights, buffers, algorithm.init_server(weights)))
    return runner


def test_nobody_is_told_how_many_images_others_have() -> None:
    """With N and its own size a client could tell the sum of all sizes from w_i."""
    data = digits(5)
    assert len(set(data.client_sizes)) > 1
    tasks = [task for tasks in watch(PrivateFedAvg(), "a", data=data, rounds=2).tasks for task in tasks]
    assert {task.weight for task in tasks} == {1.0}
    assert not any(task.server for task in tasks)


@pytest.mark.slow
def test_who_takes_part_is_secret() -> None:
    """The key decides, not the public seed: 8 rounds of two runs of one seed, and none of them as the seed says."""
    chosen = [
        [tuple(task.client for task in tasks) for tasks in watch(PrivateFedAvg(), name, rounds=8).tasks]
        for name in ("a", "b")
    ]
    public = [tuple(sample_clients(4, 2, 0, number)) for number in range(1, 9)]
    assert len({tuple(rounds) for rounds in [*chosen, public]}) == 3  # by chance equal once in 6^8
    assert all(len(set(ids)) == 2 and list(ids) == sorted(ids) for rounds in chosen for ids in rounds)


def test_the_secret_stays_at_the_server() -> None:
    for tasks in watch(PrivateFedAvg(), "clients", rounds=2).tasks:
        assert all(task.server == {} for task in tasks)


def test_every_client_is_drawn_as_often() -> None:
    """6000 rounds of 3 of 10: 1800 each, with a standard deviation of 35; pairs 400, of 19."""
    counts = torch.zeros(10, 10)
    for number in range(6000):
        drawn = torch.zeros(10)
        drawn[secret_sample(KEY, 10, 3, number)] = 1
        counts += drawn.outer(drawn)
    assert (counts.diagonal() - 1800).abs().max() < 5 * 35
    pairs = counts[~torch.eye(10, dtype=torch.bool)]
    assert (pairs - 400).abs().max() < 5 * 19


# --- the budget


NOISES, SAMPLES = [0.7, 1.0, 4.0], [(10, 5), (100, 10), (1000, 20), (50, 50)]


@pytest.mark.parametrize(("row", "column"), checkered(range(len(NOISES)), range(len(SAMPLES))))
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_epsilon_is_that_of_the_accountant(row: int, column: int, half: int) -> None:
    """Noise of deviation z C on a sum that one client moves by 2 C, round after round, for sampled clients.

    `make check` has each noise, sample and number of rounds, `make test` every three of them.
    """
    noise_multiplier, (num_clients, asked), rounds = NOISES[row], SAMPLES[column], (1, 3)[(column // 2 + half) % 2]
    clip_norm, delta = 3.0, 1e-6
    event = GaussianDpEvent((noise_multiplier * clip_norm) / (2 * clip_norm))
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    accountant.compose(SampledWithoutReplacementDpEvent(num_clients, asked, event), rounds)
    algorithm = PrivateFedAvg(clip_norm=clip_norm, noise_multiplier=noise_multiplier, delta=delta)
    reported = algorithm.metrics(server(), RoundContext(rounds, num_clients, asked))
    assert reported == {"privacy/epsilon": pytest.approx(accountant.get_epsilon(delta), rel=1e-9)}


def test_epsilon_of_the_plain_gaussian() -> None:
    """All clients, one round: between the exact value for noise z/2 and what Renyi accounting loses of it.

    Exact delta of a Gaussian mechanism with noise s (Balle and Wang, 2018):
    Phi(1/(2 s) - eps s) - e^eps Phi(-1/(2 s) - eps s).
    """
    phi = NormalDist().cdf
    z, delta = 8.0, 1e-5
    s = z / 2
    low, high = 0.0, 50.0
    for _ in range(100):
        eps = (low + high) / 2
        spent = phi(1 / (2 * s) - eps * s) - math.exp(eps) * phi(-1 / (2 * s) - eps * s)
        low, high = (eps, high) if spent > delta else (low, eps)
    reported = spent_epsilon(z, delta, 10, 10, 1)
    assert low <= reported <= 1.3 * low
    five, sampled = spent_epsilon(z, delta, 10, 10, 5), spent_epsilon(z, delta, 1000, 10, 5)
    assert reported < five
    assert sampled < five  # a secret sample hides who took part


def test_a_private_run_logs_what_it_spent() -> None:
    run = fit(private(run_dir="run", client_fraction=0.5, algorithm=PrivateFedAvg(noise_multiplier=2.0)))
    assert [row["privacy/epsilon"] for row in run.rows] == [spent_epsilon(2.0, 1e-5, 4, 2, number) for number in (1, 2)]
    assert not [name for name in run.rows[0] if name.startswith("norm/server")]  # of the key


def test_without_the_accountant_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    spent_epsilon.cache_clear()  # of other tests
    with pytest.raises(InputError, match=r"jdfl-lightning\[privacy\]"):
        fit(private(run_dir="run"))
    assert not Path("run").exists()


# --- rounds


def test_a_private_round_is_never_void() -> None:
    """Nobody answers: theta and noise. One client's failure must not decide who else counts."""
    changes: dict[str, Any] = {"algorithm": PrivateFedAvg(clip_norm=1.0, noise_multiplier=1e-9), "batch_size": 32}
    journal = play(lambda r: FitFailure(r.client, "asleep"), rounds=1, **changes)
    (report,) = journal.reports
    assert report.metrics["clients"] == 0
    assert math.isnan(report.metrics["train/loss"])
    one = play(lambda r: r if r.client == 0 else FitFailure(r.client, "asleep"), folder="o", rounds=1, **changes)
    moved = norm(sub(one.reports[0].state.weights, report.state.weights))
    assert 0.01 < moved <= 1 / 4 + 1e-6  # at most C over the four that were asked


def test_private_runs_share_no_noise_and_resume_to_the_bit() -> None:
    """Rounds 2 and 3 are repeated from the checkpoint of round 1, which holds the key: all files are the same."""
    run = private(rounds=3, client_fraction=0.5, checkpoint=Checkpointing(keep=3))
    fit(replace(run, run_dir="whole"))
    fit(replace(run, run_dir="other"))
    weights = [load_record(Path(name) / "last.safetensors")[0]["weights"] for name in ("whole", "other")]
    assert norm(sub(weights[0], weights[1])) > 1
    shutil.copytree("whole", "cut")
    fit(replace(run, resume="cut/checkpoints/1.safetensors"))
    assert contents("cut") == contents("whole")
    with pytest.raises(InputError, match=r"--algorithm\.noise_multiplier"):
        fit(replace(run, resume="cut", algorithm=PrivateFedAvg(noise_multiplier=0.1)))


def test_the_key_is_in_checkpoints_alone() -> None:
    fit(private(run_dir="run"))
    keys = {bytes(load_record(file)[0]["server.secret"]["key"].tolist()) for file in Path("run/checkpoints").iterdir()}
    (key,) = keys
    assert len(key) == KEY_BYTES
    assert len(set(key)) > 16
    holders = {file.parent.name for file in Path("run").rglob("*") if file.is_file() and key in file.read_bytes()}
    assert holders == {"checkpoints"}


# --- what is kept


def test_a_private_run_keeps_its_last_weights_alone(capsys: pytest.CaptureFixture[str], image_tree: Path) -> None:
    """Which round is the best would be found out without noise."""
    options = ["--algorithm", "PrivateFedAvg", "--algorithm.clip_norm", "0.1", "--supervision", "base"]
    tiny = ["--data.size", "8", "--data.num_clients", "4", "--rounds", "3", "--epochs", "1", "--run_dir", "run"]
    assert main(["fit", *options, *tiny]) == 0
    assert "best" not in capsys.readouterr().out
    assert not Path("run/best.safetensors").exists()
    run = read_run(Path("run"))
    assert all(math.isnan(row["test/acc_best"]) for row in run.rows)
    assert run.ends == {"last": run.rows[2]}
    table, left_out = read_runs([Path("run")])
    assert (list(table[table["best"]]["test/acc"]), left_out) == ([run.rows[2]["test/acc"]], [])
    assert main(["test", "--run", "run"]) == 0
    assert "last" in capsys.readouterr().out
    image = str(next(image_tree.rglob("*.png")))
    assert main(["predict", "--run", "run", "--weights", "best", image]) == 2
    assert "use --weights last" in capsys.readouterr().err
    assert main(["predict", "--run", "run", image]) == 0
    default = capsys.readouterr().out
    assert main(["predict", "--run", "run", "--weights", "last", image]) == 0
    assert capsys.readouterr().out == default


# --- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"supervision": "random"}, "--supervision to be base with PrivateFedAvg"),
        ({"max_update_norm": 3.0}, "--max_update_norm to be null with PrivateFedAvg"),
        ({"min_clients": 2}, "--min_clients to be 1 with PrivateFedAvg"),
        ({"checkpoint": Checkpointing(every=2)}, r"--checkpoint\.every to be 1 with PrivateFedAvg"),
        ({"algorithm": PrivateFedAvg(delta=0.25)}, r"--algorithm\.delta to be below 1 / 4"),
    ],
)
def test_a_false_guarantee_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        private(**change)
    private(algorithm=PrivateFedAvg(delta=0.2499))


def integer_buffer_net(size: int) -> nn.Module:
    """A backbone with a whole number beside its weights, which the server takes from a client as it is."""
    backbone = tiny_net(size)
    backbone.register_buffer("seen", torch.zeros((), dtype=torch.long))
    return backbone


@pytest.mark.parametrize(
    "backbone", ["helpers.batch_norm_net", "helpers.frozen_net", "test_privacy.integer_buffer_net"]
)
def test_what_would_leave_without_noise_is_refused(backbone: str) -> None:
    with pytest.raises(InputError, match="without running statistics, other buffers and frozen parameters"):
        fit(private(run_dir="run", backbone=backbone))
    assert not Path("run").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"clip_norm": 0.0},
        {"clip_norm": math.inf},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"delta": 1.0},
    ],
)
def test_bad_hyper_parameters(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"--algorithm\.{next(iter(change))}"):
        PrivateFedAvg(**change)


def test_discovery_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("discover", "diagnose"):
        assert main([command, "--algorithm", "PrivateFedAvg", "--supervision", "base"]) == 2
        assert "--algorithm to be another one" in capsys.readouterr().err
