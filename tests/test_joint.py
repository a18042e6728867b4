"""The joint head, targets, loss and metrics against numbers worked out by hand and against other libraries."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from helpers import examples
from jdfl_lightning.joint import (
    DomainAccuracy,
    GradedTargets,
    HardTargets,
    JointAccuracy,
    JointHead,
    PlainTargets,
    RandomTargets,
    SoftTargetKLLoss,
    TargetRule,
    class_probabilities,
    class_scores,
    dense_targets,
    joint_index,
    predict_class,
    soft_target_kl,
    split_index,
)
from jdfl_lightning.joint.loss import class_kl

SIZES = st.integers(1, 6)
SEEDS = st.integers(0, 2**32)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- head


def test_paper_1d_example_of_a_piecewise_linear_score() -> None:
    """l_1(h) = h and l_2(h) = 2 - h give s(h) = max(h, 2 - h): a V with its kink at h = 1."""
    head = JointHead(1, num_classes=1, num_domains=2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        head.bias.copy_(torch.tensor([0.0, 2.0]))
    h = torch.tensor([[-1.0], [0.0], [1.0], [2.0], [3.0]])
    assert head.class_scores(head(h)).squeeze(1).tolist() == [3.0, 2.0, 1.0, 2.0, 3.0]


def test_joint_index_is_domain_major() -> None:
    assert joint_index(0, 6, num_classes=7) == 6
    assert joint_index(1, 0, num_classes=7) == 7
    domains, labels = split_index(torch.arange(28), num_classes=7)
    assert torch.equal(joint_index(domains, labels, 7), torch.arange(28))
    assert labels.tolist() == [j % 7 for j in range(28)]


@given(m=SIZES, c=SIZES, seed=SEEDS)
def test_class_of_the_largest_joint_logit_is_the_prediction(m: int, c: int, seed: int) -> None:
    logits = torch.randn(20, m * c, generator=generator(seed))
    assert torch.equal(predict_class(logits, c), logits.argmax(1) % c)


@given(m=SIZES, c=SIZES, seed=SEEDS)
def test_class_probabilities_sum_joint_ones(m: int, c: int, seed: int) -> None:
    logits = torch.randn(5, m * c, generator=generator(seed))
    expected = sum(logits.softmax(1)[:, d * c : (d + 1) * c] for d in range(m))
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(class_probabilities(logits, c), expected)


def test_max_and_sum_by_hand() -> None:
    """e^2 = 7.3891 for class 0 and 3 e^1.5 = 13.4451 for class 1: 13.4451 / 20.8342 = 0.6453 of the probability."""
    logits = torch.tensor([2.0, 1.5, -9.0, 1.5, -9.0, 1.5])
    assert predict_class(logits, 2) == 0
    assert predict_class(logits, 2, "sum") == 1
    torch.testing.assert_close(class_probabilities(logits, 2), torch.tensor([0.3547, 0.6453]), atol=1e-4, rtol=0)


@given(m=SIZES, c=st.integers(2, 6), seed=SEEDS, scale=st.floats(0.1, 20))
def test_max_and_sum_differ_within_log_m_alone(m: int, c: int, seed: int, scale: float) -> None:
    """max <= logsumexp <= max + ln M, so that a lead of more than ln M by max is a lead by sum."""
    logits = scale * torch.randn(20, m * c, generator=generator(seed), dtype=torch.float64)
    largest, summed = class_scores(logits, c), class_scores(logits, c, "sum")
    assert (summed >= largest - 1e-9).all()
    assert (summed <= largest + math.log(m) + 1e-9).all()
    first, second = largest.topk(2).values.unbind(1)
    clear = first - second > math.log(m) + 1e-9
    assert torch.equal(predict_class(logits, c)[clear], predict_class(logits, c, "sum")[clear])


@given(m=SIZES, c=SIZES, seed=SEEDS, bias=st.booleans())
def test_tiled_head_predicts_like_the_old_one(m: int, c: int, seed: int, bias: bool) -> None:
    torch.manual_seed(seed)
    old, x = nn.Linear(5, c, bias=bias), torch.randn(11, 5)
    new = JointHead.expand(old, m, init="tile")
    torch.testing.assert_close(new.class_scores(new(x)), old(x))
    assert torch.equal(new.predict(new(x)), old(x).argmax(1))
    assert new.weight.data_ptr() != old.weight.data_ptr()


def test_fresh_head_is_new() -> None:
    old = nn.Linear(5, 3)
    new = JointHead.expand(old, 2)
    assert (new.num_classes, new.num_domains, new.weight.shape) == (3, 2, (6, 5))
    assert not torch.equal(new.weight[:3], old.weight)


def test_head_survives_copying_and_a_state_dict_round_trip() -> None:
    head, x = JointHead(4, 3, 2, score="sum"), torch.randn(2, 4)
    twin = JointHead(4, 3, 2)
    twin.load_state_dict(head.state_dict())
    for other in (copy.deepcopy(head), pickle.loads(pickle.dumps(head)), twin):
        assert torch.equal(other(x), head(x))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((0, 3, 2), "in_features"), ((4, 0, 2), "num_classes"), ((4, 3, 0), "num_domains")],
)
def test_head_names_a_bad_argument(arguments: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        JointHead(*arguments)


def test_head_refuses_what_it_cannot_expand() -> None:
    with pytest.raises(ValueError, match="init"):
        JointHead.expand(nn.Linear(2, 2), 2, init="zero")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one domain"):
        JointHead.expand(JointHead(2, 2, 2), 2)
    with pytest.raises(ValueError, match="multiple of num_classes=3"):
        class_scores(torch.zeros(1, 4), 3)
    with pytest.raises(ValueError, match="score"):
        class_scores(torch.zeros(1, 4), 2, "mean")  # type: ignore[arg-type]


# --- targets


def test_paper_toy_target() -> None:
    """M = 4, alpha = 0.45: similarities to domain 1 that differ by tau ln(w_a / w_b) give [0.45, 0.39, 0.09, 0.07].

    softmax(s / tau) is (0.39, 0.09, 0.07) / 0.55 if s_2 = 0.9, s_3 = 0.9 + 0.1 ln(0.09 / 0.39) = 0.7534 and
    s_4 = 0.9 + 0.1 ln(0.07 / 0.39) = 0.7283; unit vectors (s, sqrt(1 - s^2)) have these cosines with (1, 0).
    """
    cosines = [1.0] + [0.9 + 0.1 * math.log(w / 0.39) for w in (0.39, 0.09, 0.07)]
    centroids = torch.tensor([[s, math.sqrt(1 - s * s)] for s in cosines], dtype=torch.float64)
    rule = GradedTargets(centroids, alpha=0.45, tau=0.1)
    torch.testing.assert_close(rule(torch.tensor([0])), torch.tensor([[0.45, 0.39, 0.09, 0.07]]), atol=1e-6, rtol=0)


@given(m=SIZES, seed=SEEDS, alpha=st.floats(0.01, 1), tau=st.floats(0.01, 10), scale=st.floats(1e-3, 1e3))
def test_graded_targets_hold_their_laws(m: int, seed: int, alpha: float, tau: float, scale: float) -> None:
    """Rows sum to 1, alpha on the own domain, the others in the order of their similarity; lengths do not matter."""
    centroids = torch.randn(m, 8, generator=generator(seed)).double()
    table = GradedTargets(centroids, alpha, tau).table
    torch.testing.assert_close(table.sum(1), torch.ones(m))
    torch.testing.assert_close(GradedTargets(centroids * scale, alpha, tau).table, table)
    if m == 1:
        assert table.item() == 1
        return
    torch.testing.assert_close(table.diagonal(), torch.full((m,), alpha))
    unit = centroids / centroids.norm(dim=1, keepdim=True)
    for own in range(m):
        others = [d for d in range(m) if d != own]
        by_similarity = sorted(others, key=lambda d: float(unit[own] @ unit[d]))
        weights = table[own, by_similarity]
        assert (weights.diff() >= 0).all()


def test_alpha_follows_the_paper() -> None:
    assert GradedTargets(torch.eye(5)).table[0, 0].item() == pytest.approx(0.55)
    assert GradedTargets(torch.eye(6)).table[0, 0].item() == pytest.approx(0.45)


def test_a_tiny_temperature_chooses_the_most_similar() -> None:
    table = GradedTargets(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), alpha=0.6, tau=1e-300).table
    torch.testing.assert_close(table[0], torch.tensor([0.6, 0.4, 0.0]))


def test_a_zero_centroid_is_similar_to_none() -> None:
    table = GradedTargets(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]), alpha=0.5).table
    assert torch.isfinite(table).all()
    torch.testing.assert_close(table[1], torch.tensor([0.25, 0.5, 0.25]))


def test_random_targets_are_uniform_and_drawn_anew() -> None:
    """4,000 draws from 4 domains: each count is 1,000 with a standard deviation of 27; 6 of them are 164."""
    rule, domains, g = RandomTargets(4), torch.zeros(4000, dtype=torch.long), generator(0)
    first, second = rule(domains, g), rule(domains, g)
    assert ((first.sum(0) - 1000).abs() < 164).all()
    assert set(first.unique().tolist()) == {0.0, 1.0}
    assert 0.65 < (first != second).any(1).float().mean() < 0.85
    assert torch.equal(rule(domains, generator(0)), first)


def test_random_targets_share_the_rest_evenly() -> None:
    weights = RandomTargets(5, phi=0.6)(torch.zeros(50, dtype=torch.long))
    torch.testing.assert_close(weights.sort(dim=1).values, torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.6]]).expand(50, 5))
    assert RandomTargets(1, phi=0.3)(torch.zeros(2, dtype=torch.long)).tolist() == [[1.0], [1.0]]


def test_hard_and_plain_targets() -> None:
    assert HardTargets(3)(torch.tensor([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert PlainTargets()(torch.tensor([5, 2])).tolist() == [[1], [1]]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: GradedTargets(torch.eye(2), alpha=0.0), "alpha"),
        (lambda: GradedTargets(torch.eye(2), alpha=1.1), "alpha"),
        (lambda: GradedTargets(torch.eye(2), tau=0.0), "tau"),
        (lambda: GradedTargets(torch.eye(2), alpha=math.nan), "alpha"),
        (lambda: GradedTargets(torch.zeros(3)), "centroids"),
        (lambda: RandomTargets(2, phi=-0.1), "phi"),
        (lambda: RandomTargets(2, phi=1.1), "phi"),
        (lambda: TargetRule(torch.zeros(2, 3)), "table"),
    ],
)
def test_rules_name_a_bad_argument(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()  # type: ignore[operator]


# --- loss


def test_loss_by_hand() -> None:
    """p = softmax(2, 0, 1, -1): log Z = log(e^2 + 1 + e + 1/e) = 2.4401897.

    Cross-entropy with (.7, 0, .3, 0): 2.4401897 - .7 * 2 - .3 * 1 = 0.7401897; entropy of the target 0.6108643; the
    divergence is their difference, 0.1293254.
    """
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]], dtype=torch.float64)
    target = torch.tensor([[0.7, 0.0, 0.3, 0.0]], dtype=torch.float64)
    entropy = -(0.7 * math.log(0.7) + 0.3 * math.log(0.3))
    value = soft_target_kl(logits, target).item()
    assert value + entropy == pytest.approx(0.7401897, abs=1e-7)
    assert value == pytest.approx(0.1293254, abs=1e-7)


@given(count=st.integers(1, 40), classes=st.integers(2, 9), seed=SEEDS, scale=st.sampled_from([0.1, 3.0, 200.0]))
def test_ordinary_labels_have_the_bits_of_one_domain(count: int, classes: int, seed: int, scale: float) -> None:
    """Value and gradient; it is the cross-entropy."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        first = (scale * torch.randn(count, classes, generator=generator)).to(dtype).requires_grad_()
        second = first.detach().clone().requires_grad_()
        ours, theirs = class_kl(first, labels), soft_target_kl(second, torch.ones(count, 1), labels)
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, cross_entropy(first.to(ours.dtype), labels, reduction="none"))
        for values in (ours, theirs):
            values.mean().backward()
        assert torch.equal(ours.mean(), theirs.mean())
        assert first.grad is not None
        assert second.grad is not None
        assert torch.equal(first.grad, second.grad)


@given(m=SIZES, c=SIZES, seed=SEEDS)
def test_weights_and_dense_targets_agree_in_value_and_gradient(m: int, c: int, seed: int) -> None:
    g = generator(seed)
    logits = torch.randn(7, m * c, generator=g, dtype=torch.float64)
    weights = torch.rand(7, m, generator=g, dtype=torch.float64).softmax(1)
    labels = torch.randint(c, (7,), generator=g)
    dense = dense_targets(weights, labels, c)
    values, gradients = [], []
    for arguments in ((weights, labels), (dense, None)):
        leaf = logits.clone().requires_grad_()
        value = SoftTargetKLLoss()(leaf, *arguments)
        value.backward()
        values.append(value.detach())
        gradients.append(leaf.grad)
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(values[1], kl_div(logits.log_softmax(1), dense, reduction="batchmean"))
    torch.testing.assert_close(dense.sum(1), torch.ones(7, dtype=torch.float64))


@given(m=SIZES, c=SIZES, seed=SEEDS)
def test_one_hot_target_is_cross_entropy(m: int, c: int, seed: int) -> None:
    g = generator(seed)
    logits, labels = torch.randn(9, m * c, generator=g), torch.randint(c, (9,), generator=g)
    domains = torch.randint(m, (9,), generator=g)
    expected = cross_entropy(logits, joint_index(domains, labels, c))
    torch.testing.assert_close(SoftTargetKLLoss()(logits, HardTargets(m)(domains), labels), expected)


def test_no_nan_from_zero_mass_or_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]])
    for arguments in (
        (torch.tensor([[1.0, 0.0, 0.0, 0.0]]), None),
        (torch.tensor([[1.0, 0.0]]), torch.tensor([0])),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([0])),
    ):
        leaf = logits.clone().requires_grad_()
        loss = SoftTargetKLLoss()(leaf, *arguments)
        (gradient,) = torch.autograd.grad(loss, leaf)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


def test_reductions() -> None:
    logits, weights, labels = torch.randn(4, 6), torch.rand(4, 2).softmax(1), torch.tensor([0, 1, 2, 0])
    each = SoftTargetKLLoss("none")(logits, weights, labels)
    torch.testing.assert_close(SoftTargetKLLoss("sum")(logits, weights, labels), each.sum())
    torch.testing.assert_close(SoftTargetKLLoss()(logits, weights, labels), each.mean())
    with pytest.raises(ValueError, match="reduction"):
        SoftTargetKLLoss("max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dense targets"):
        SoftTargetKLLoss()(logits, weights)
    with pytest.raises(ValueError, match="multiple of M=4"):
        SoftTargetKLLoss()(logits, torch.ones(4, 4), labels)


# --- metrics


@given(c=st.integers(2, 6), seed=SEEDS)
def test_one_domain_is_ordinary_accuracy(c: int, seed: int) -> None:
    g = generator(seed)
    logits, labels = torch.randn(30, c, generator=g), torch.randint(c, (30,), generator=g)
    reference = MulticlassAccuracy(c, average="micro")
    torch.testing.assert_close(JointAccuracy(c)(logits, labels), reference(logits, labels))


@given(m=SIZES, c=SIZES, seed=SEEDS)
def test_logits_and_indices_agree_and_batches_add_up(m: int, c: int, seed: int) -> None:
    g = generator(seed)
    logits, labels = torch.randn(30, m * c, generator=g), torch.randint(c, (30,), generator=g)
    whole, parts = JointAccuracy(c), JointAccuracy(c)
    whole.update(logits, labels)
    for start in (0, 7, 20):
        end = {0: 7, 7: 20, 20: 30}[start]
        parts.update(logits.argmax(1)[start:end], labels[start:end])
    assert whole.compute() == parts.compute()
    assert whole.compute().item() == pytest.approx(sum((logits.argmax(1) % c == labels).tolist()) / 30)


@examples(30)
@given(seed=SEEDS)
def test_domain_accuracy_against_a_plain_count(seed: int) -> None:
    g = generator(seed)
    predictions, labels = torch.randint(12, (40,), generator=g), torch.randint(3, (40,), generator=g)
    domains = torch.randint(3, (40,), generator=g)
    scores = DomainAccuracy(3, ["a", "b", "c", "never"])(predictions, labels, domains=domains)
    each = []
    for index, name in enumerate("abc"):
        pairs = [(p % 3, y) for p, y, d in zip(predictions, labels, domains, strict=True) if d == index]
        if pairs:
            each.append(sum(p == y for p, y in pairs) / len(pairs))
            assert scores[name].item() == pytest.approx(float(each[-1]))
    assert scores["never"].isnan()
    assert scores["worst"].item() == pytest.approx(float(min(each)))
    assert scores["spread"].item() == pytest.approx(float(max(each) - min(each)))
    assert scores["overall"].item() == pytest.approx(float((predictions % 3 == labels).float().mean()))


def test_metrics_are_not_merged_in_a_collection() -> None:
    """The first batch gives every metric the same counts; the second one does not."""
    metrics = MetricCollection(
        {
            "joint": JointAccuracy(2),
            "summed": JointAccuracy(2, score="sum"),
            "plain": MulticlassAccuracy(4, average="micro"),
            "wide": JointAccuracy(4),
        }
    )
    metrics.update(torch.tensor([[9.0, 0.0, 0.0, 0.0]]), torch.tensor([0]))
    # the largest logit is of class 0, the larger sum that of class 1
    metrics.update(torch.tensor([[2.0, 1.9, 0.0, 1.9]]), torch.tensor([1]))
    result = metrics.compute()
    assert {name: value.item() for name, value in result.items()} == {
        "joint": 0.5,
        "summed": 1.0,
        "plain": 0.5,
        "wide": 0.5,
    }
    both = MetricCollection([JointAccuracy(2), DomainAccuracy(2, 2)])
    assert len(both(torch.tensor([0, 1]), torch.tensor([0, 0]), domains=torch.tensor([0, 1]))) == 6


def test_metrics_name_bad_input() -> None:
    with pytest.raises(ValueError, match="joint logits"):
        JointAccuracy(2).update(torch.zeros(3), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="num_classes"):
        JointAccuracy(0)
    with pytest.raises(ValueError, match="distinct names"):
        DomainAccuracy(2, ["a", "a"])
    with pytest.raises(ValueError, match="distinct names"):
        DomainAccuracy(2, ["worst"])
    with pytest.raises(ValueError, match="from 0 to 1"):
        DomainAccuracy(2, 2).update(torch.tensor([0]), torch.tensor([0]), torch.tensor([2]))


def test_metrics_keep_torchmetrics_conventions() -> None:
    metric = JointAccuracy(2)
    assert (metric.higher_is_better, metric.is_differentiable, metric.full_state_update) == (True, False, False)
    metric(torch.tensor([0, 1]), torch.tensor([0, 0]))
    twin = pickle.loads(pickle.dumps(metric))
    assert twin.compute() == metric.compute() == torch.tensor(0.5)
    metric.reset()
    metric(torch.tensor([0]), torch.tensor([0]))
    assert metric.compute() == 1
