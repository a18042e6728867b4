"""What users of torch, torchmetrics and Lightning do to heads, losses, metrics and modules: all of it is survived."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import shutil
import socket
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import onnxruntime
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.cli import LightningCLI
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.checks import check_forward_full_state_property

from helpers import examples
from jdfl_lightning import (
    ClassScores,
    DigitsDomains,
    DomainAccuracy,
    GradedTargets,
    HardTargets,
    JointAccuracy,
    JointHead,
    JointModule,
    PaperCNN,
    PlainTargets,
    RandomTargets,
    SoftTargetKLLoss,
    TargetRule,
    class_probabilities,
    class_scores,
    predict_class,
)
from jdfl_lightning.backends.worker import start_fork_server
from jdfl_lightning.joint import Score

C, M = 3, 4
RULES = [PlainTargets(), HardTargets(M), GradedTargets(torch.eye(M)), RandomTargets(M, phi=0.7)]
SCORES: tuple[Score, Score] = ("max", "sum")
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def batch(size: int = 12, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 3, 8, 8, generator=g)
    return images, torch.randint(C, (size,), generator=g), torch.arange(size) % M


def batches(*of: Any) -> DataLoader[Any]:
    """A loader of ready-made batches."""
    return DataLoader(list(of), batch_size=None)  # type: ignore[arg-type]


def network(score: Score = "max") -> nn.Sequential:
    """The paper's CNN with a joint head and class scores."""
    torch.manual_seed(0)
    return nn.Sequential(PaperCNN(8), JointHead(128, C, M), ClassScores(C, score)).eval()


def joint_module(targets: TargetRule | None = None, **arguments: Any) -> JointModule:
    torch.manual_seed(0)
    return JointModule(PaperCNN(8), 128, C, targets, **arguments)


def trainer(**arguments: Any) -> pl.Trainer:
    """A Trainer of one epoch that says and leaves nothing."""
    defaults: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**(defaults | arguments))


# --- compiled and exported


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_step_is_compiled_as_one_graph(rule: TargetRule) -> None:
    """Head, targets, loss and prediction, forwards and backwards; AOTAutograd traces them, nothing breaks the graph."""
    head, loss = JointHead(8, C, rule.num_domains), SoftTargetKLLoss()
    features, (_, labels, domains) = torch.randn(12, 8), batch()

    def step(features: Tensor, labels: Tensor, domains: Tensor) -> tuple[Tensor, ...]:
        logits = head(features)
        return loss(logits, rule(domains), labels), head.predict(logits), head.class_probabilities(logits)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    results, gradients = [], []
    for run in (step, compiled):
        head.zero_grad()
        torch.manual_seed(3)  # of the random targets
        results.append(run(features, labels, domains))
        results[-1][0].backward()
        gradients.append(head.weight.grad)
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend of torch.compile needs a C++ compiler")
def test_the_default_backend_compiles_a_network() -> None:
    head = nn.Sequential(JointHead(8, C, M), ClassScores(C, "sum"))
    features = torch.randn(5, 8)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a compiler says
        torch.testing.assert_close(torch.compile(head)(features), head(features))


@pytest.mark.slow
def test_a_compiled_module_is_trained_by_a_trainer() -> None:
    """The same weights as without compilation, within rounding."""
    weights = []
    for compiled in (False, True):
        module = joint_module(HardTargets(M), lr=0.1)
        torch._dynamo.reset()
        fitted = torch.compile(module, backend="aot_eager") if compiled else module
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a compiler says
            trainer().fit(fitted, batches(*(batch(seed=i) for i in range(3))))  # type: ignore[arg-type]
        weights.append(module.state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, msg=name)
    assert not torch.equal(weights[0]["head.weight"], joint_module(HardTargets(M)).head.weight)


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES)
def test_export_keeps_the_batch_free(score: Score) -> None:
    model, (images, _, _) = network(score), batch(7)
    program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for size in (2, 7, 30):
        images, _, _ = batch(size)
        torch.testing.assert_close(program.module()(images), model(images))


@pytest.mark.slow
@pytest.mark.parametrize("score", ["max", "sum"])
def test_onnxruntime_gives_the_same_class_scores(score: Score) -> None:
    model, (images, _, _) = network(score), batch(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the exporter says of itself
        program = torch.onnx.export(
            model, (images,), dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch")},), verbose=False
        )
    assert program is not None
    program.save("model.onnx")
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    (name,) = [entry.name for entry in session.get_inputs()]
    for size in (2, 7, 30):
        images, _, _ = batch(size)
        (scores,) = session.run(None, {name: images.numpy()})
        with torch.no_grad():
            expected = model(images)
        torch.testing.assert_close(torch.from_numpy(scores), expected, rtol=1e-4, atol=1e-5)
        assert expected.shape == (size, C)


@pytest.mark.parametrize("score", SCORES)
def test_class_scores_as_a_layer(score: Score) -> None:
    logits = torch.randn(6, M * C)
    assert torch.equal(ClassScores(C, score)(logits), class_scores(logits, C, score))
    with pytest.raises(ValueError, match="score"):
        ClassScores(C, "mean")  # type: ignore[arg-type]


# --- saved and copied


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_copies_of_a_module_are_the_module(rule: TargetRule) -> None:
    module = joint_module(rule, score="sum", domains=["a", "b", "c", "d"])
    module.generator = torch.Generator().manual_seed(1)
    twin = joint_module(rule)
    nn.init.zeros_(twin.head.weight)
    twin.load_state_dict(module.state_dict())
    copied, pickled = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    assert copied.generator is not None
    assert copied.generator.get_state().equal(module.generator.get_state())
    for other in (twin, copied, pickled):
        other.generator = torch.Generator().manual_seed(1)
        module.generator = torch.Generator().manual_seed(1)
        assert torch.equal(other(batch()[0]), module(batch()[0]))
        assert torch.equal(_loss(other), _loss(module))
    assert pickled.head.score == copied.head.score == "sum"
    assert torch.load(_saved(module.state_dict()), weights_only=True).keys() == module.state_dict().keys()


def _loss(module: JointModule) -> Tensor:
    module.loss_term = lambda task_loss, features, labels: task_loss  # there is no Trainer to log to
    try:
        return module.training_step(batch(), 0)
    finally:
        module.loss_term = None


def _saved(state: Any) -> Path:
    torch.save(state, "state.pt")
    return Path("state.pt")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_metrics_rules_and_losses_are_copied(rule: TargetRule) -> None:
    accuracy, loss = DomainAccuracy(C, M), SoftTargetKLLoss("sum")
    accuracy.update(torch.randn(12, M * C), *batch()[1:])
    for copies in (copy.deepcopy((accuracy, loss, rule)), pickle.loads(pickle.dumps((accuracy, loss, rule)))):
        assert copies[0].compute() == accuracy.compute()
        assert copies[1].reduction == "sum"
        assert torch.equal(copies[2].table, rule.table)
        assert (type(copies[2]), copies[2].draw) == (type(rule), rule.draw)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_checkpoint_needs_the_backbone_alone(rule: TargetRule) -> None:
    module = joint_module(rule, domains=["a", "b", "c", "d"], lr=0.3, score="sum")
    fitting = trainer()
    fitting.fit(module, batches(batch()))
    fitting.save_checkpoint("module.ckpt")
    loaded = JointModule.load_from_checkpoint("module.ckpt", backbone=PaperCNN(8), weights_only=True)
    assert torch.equal(loaded(batch()[0]), module(batch()[0]))
    assert (loaded.targets.draw, loaded.head.score, loaded.lr) == (rule.draw, "sum", 0.3)
    assert torch.equal(loaded.targets.table, rule.table)
    assert loaded.test_accuracy.names == ["a", "b", "c", "d"]
    torch.manual_seed(0)
    expected = _loss(module)
    torch.manual_seed(0)
    assert torch.equal(_loss(loaded), expected)
    more, again = trainer(max_epochs=2), JointModule(PaperCNN(8), 128, C, lr=0.3)
    safely: dict[str, Any] = (
        {"weights_only": True} if "weights_only" in inspect.signature(more.fit).parameters else {}
    )  # Lightning 2.6
    more.fit(again, batches(batch()), ckpt_path="module.ckpt", **safely)  # goes on from there
    assert more.current_epoch == 2
    assert again.head.num_domains == rule.num_domains


def test_targets_that_are_given_are_not_replaced_by_a_checkpoint() -> None:
    module = joint_module(HardTargets(M))
    fitting = trainer()
    fitting.fit(module, batches(batch()))
    fitting.save_checkpoint("module.ckpt")
    loaded = JointModule.load_from_checkpoint(
        "module.ckpt", backbone=PaperCNN(8), targets=RandomTargets(M), weights_only=True
    )
    assert isinstance(loaded.targets, RandomTargets)
    with pytest.raises(RuntimeError, match="size mismatch"):
        JointModule.load_from_checkpoint(
            "module.ckpt", backbone=PaperCNN(8), targets=RandomTargets(2), weights_only=True
        )


# --- precision


@examples(30)
@given(scale=st.floats(0, 1e3), seed=st.integers(0, 99), half=st.sampled_from([torch.bfloat16, torch.float16]))
def test_half_precision_keeps_the_loss_in_float32(scale: float, seed: int, half: torch.dtype) -> None:
    """The loss of logits in half precision is that of the same numbers in single precision, to the last bit."""
    torch.manual_seed(seed)
    logits, (_, labels, domains) = scale * torch.randn(12, M * C), batch()
    weights = GradedTargets(torch.randn(M, 5))(domains)
    with torch.autocast("cpu", dtype=half):
        loss = SoftTargetKLLoss()(logits.to(half), weights, labels)
        probabilities = class_probabilities(logits.to(half), C)
    assert loss.dtype == probabilities.dtype == torch.float32
    assert torch.isfinite(loss)
    assert torch.equal(loss, SoftTargetKLLoss()(logits.to(half).float(), weights, labels))
    torch.testing.assert_close(probabilities.sum(1), torch.ones(12))
    assert SoftTargetKLLoss()(logits.to(half), weights.to(half), labels).dtype == torch.float32  # all in half


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "64-true"])
def test_precisions_of_a_trainer(precision: Any) -> None:
    module, losses = joint_module(GradedTargets(torch.eye(M)), lr=0.1), []

    def term(task_loss: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        losses.append(task_loss)
        return task_loss

    module.loss_term = term
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of float16 on a CPU
        trainer(precision=precision).fit(module, batches(*(batch(seed=i) for i in range(3))))
    assert all(torch.isfinite(loss) for loss in losses)
    assert {loss.dtype for loss in losses} == {torch.float64 if precision == "64-true" else torch.float32}


# --- several processes


def _metrics() -> MetricCollection:
    return MetricCollection(
        {"joint": JointAccuracy(C), "summed": JointAccuracy(C, "sum"), "domains": DomainAccuracy(C, M)}
    )


def _logits(seed: int) -> Tensor:
    return torch.randn(12, M * C, generator=torch.Generator().manual_seed(seed))


def _count(metrics: MetricCollection, seeds: range) -> dict[str, Tensor]:
    for seed in seeds:
        _, labels, domains = batch(seed=seed)
        metrics.update(_logits(seed), labels, domains=domains // 2 + 2 * (seed // 5))  # processes see other domains
    results: dict[str, Tensor] = metrics.compute()
    return results


def _gradient(model: nn.Module, images: Tensor, labels: Tensor, domains: Tensor) -> Tensor:
    SoftTargetKLLoss()(model(images), HardTargets(M)(domains), labels).backward()
    gradient = next(p.grad for n, p in model.named_parameters() if n.endswith("1.weight") and p.shape == (M * C, 128))
    assert gradient is not None
    return gradient


def _evaluate(module: JointModule, tool: pl.Trainer) -> dict[str, float]:
    loader = DataLoader(TensorDataset(*batch(64)), batch_size=8)
    (valid,) = tool.validate(module, loader, verbose=False)
    (test,) = tool.test(module, loader, verbose=False)
    return dict(valid) | dict(test)


def _process(rank: int, folder: str, port: int) -> None:
    """One of two processes, started as torchrun does it, with its share of the data."""
    torch.set_num_threads(1)
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    place = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in (rendezvous | place).items()})
    torch.distributed.init_process_group("gloo")
    results = _count(_metrics(), range(5) if rank == 0 else range(5, 8))
    half = slice(0, 6) if rank == 0 else slice(6, 12)
    model = nn.parallel.DistributedDataParallel(network()[:2])
    gradient = _gradient(model, *(part[half] for part in batch()))

    tool = trainer(strategy="ddp", devices=2)
    module = joint_module(RandomTargets(M), lr=0.05)
    loader = DataLoader(TensorDataset(*batch(64)), batch_size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*sync_dist.*")
        tool.fit(module, loader, loader)
        evaluated = _evaluate(module, tool)
    torch.save((results, gradient, evaluated, module.state_dict()), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each of two processes leaves; they come from the fork server of the workers, which has imported torch."""
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_fork_server()
    start_processes(_process, (str(folder), port), nprocs=2, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
def test_metrics_of_two_processes_are_those_of_one(two_processes: list[Any]) -> None:
    """Five batches here and three there are eight batches."""
    expected = _count(_metrics(), range(8))
    for results, *_ in two_processes:
        assert results == expected


@pytest.mark.slow
def test_gradients_of_two_processes_are_those_of_one(two_processes: list[Any]) -> None:
    """Two halves of a batch, averaged, are the whole batch."""
    whole = _gradient(network()[:2], *batch())
    for _, gradient, *_ in two_processes:
        torch.testing.assert_close(gradient, whole)


@pytest.mark.slow
def test_a_trainer_with_two_processes(two_processes: list[Any]) -> None:
    """Both end with the same weights, which one process evaluates in the same way."""
    (*_, first, weights), (*_, second, others) = two_processes
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    module = joint_module(RandomTargets(M))
    assert not torch.equal(weights["head.weight"], module.head.weight)
    module.load_state_dict(weights)
    alone = pytest.approx(_evaluate(module, trainer()))
    assert first == alone
    assert second == alone
    assert {"val/acc", "test/acc", "test/acc_worst", "test/acc_spread", "test/acc/3"} <= set(first)


# --- torchmetrics' conventions

METRICS: list[tuple[type[Metric], dict[str, Any]]] = [
    (JointAccuracy, {"num_classes": C}),
    (JointAccuracy, {"num_classes": C, "score": "sum"}),
    (DomainAccuracy, {"num_classes": C, "domains": M}),
]


def _inputs(kind: type[Metric]) -> dict[str, Tensor]:
    _, labels, domains = batch()
    return {"preds": _logits(0), "target": labels} | ({"domains": domains} if kind is DomainAccuracy else {})


@pytest.mark.parametrize(("kind", "arguments"), METRICS)
def test_conventions(kind: type[Metric], arguments: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """`full_state_update = False` gives the same values as True: torchmetrics' own check raises if not."""
    metric = kind(**arguments)
    assert (metric.higher_is_better, metric.is_differentiable, metric.full_state_update) == (True, False, False)
    assert (metric.plot_lower_bound, metric.plot_upper_bound) == (0.0, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the standard deviation of one time
        check_forward_full_state_property(kind, arguments, _inputs(kind), num_update_to_compare=[2], reps=1)
    assert "Partial state" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "arguments"), METRICS)
def test_plots(kind: type[Metric], arguments: dict[str, Any]) -> None:
    metric = kind(**arguments)
    values = [metric(**_inputs(kind)) for _ in range(3)]
    for figure, axes in (metric.plot(), metric.plot(values[0]), metric.plot(values)):
        assert isinstance(figure, Figure)
        low, high = axes.get_ylim()
        assert low <= 0 < 1 <= high
    own = Figure().add_subplot()
    assert metric.plot(ax=own)[1] is own


@examples(30)
@given(seeds=st.lists(st.integers(0, 999), min_size=1, max_size=4), groups=st.booleans())
def test_a_collection_gives_what_its_metrics_give(seeds: list[int], groups: bool) -> None:
    """Together, with or without compute groups, by update or by forward, in one collection or one by one."""
    members: dict[str, Any] = {
        "joint": JointAccuracy(C),
        "again": JointAccuracy(C),
        "summed": JointAccuracy(C, "sum"),
        "domains": DomainAccuracy(C, M),
        "named": DomainAccuracy(C, ["a", "b", "c", "d"]),
    }
    alone = copy.deepcopy(members)
    updated = MetricCollection(dict(members), compute_groups=groups)
    called = updated.clone()
    for seed in seeds:
        _, labels, domains = batch(seed=seed)
        updated.update(_logits(seed), labels, domains=domains)
        called(_logits(seed), labels, domains=domains)
        for metric in alone.values():
            metric.update(_logits(seed), labels, *[domains] * isinstance(metric, DomainAccuracy))
    for collection in (updated, called):
        result = collection.compute()
        for name in ("joint", "again", "summed"):
            assert result[name] == alone[name].compute()
        for name in ("domains", "named"):
            for entry, value in alone[name].compute().items():
                assert result[f"{name}_{entry}"] == value
    if groups:  # the two metrics that are the same are counted once, and so are those that differ in names alone
        together = [set(group) for group in updated.compute_groups.values()]
        assert {"joint", "again"} in together
        assert {"domains", "named"} in together


@pytest.mark.parametrize(("kind", "arguments"), METRICS)
def test_a_metric_reset_by_a_trainer_counts_on(kind: type[Metric], arguments: dict[str, Any]) -> None:
    """A Trainer evaluates in inference mode; what it leaves must be of use outside of it."""
    metric, expected = kind(**arguments), kind(**arguments)
    with torch.inference_mode():
        metric.update(**_inputs(kind))
        metric.reset()
    metric.update(**_inputs(kind))
    expected.update(**_inputs(kind))
    assert metric.compute() == expected.compute()


# --- LightningCLI

CONFIG = """
seed_everything: 0
trainer:
  max_epochs: 1
  accelerator: cpu
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: .
model:
  backbone:
    class_path: jdfl_lightning.PaperCNN
    init_args:
      size: 8
  in_features: 128
  num_classes: 10
  targets:
    class_path: jdfl_lightning.GradedTargets
    init_args:
      centroids: [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-1.0, 0.0]]
      alpha: 0.7
  domains: [ink, chalk, photo, outline]
  lr: 0.1
  score: sum
data:
  size: 8
"""


def cli(*arguments: str) -> LightningCLI:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LightningCLI(JointModule, DigitsDomains, save_config_callback=None, args=list(arguments))


def test_a_yaml_file_is_all_that_a_user_writes() -> None:
    Path("config.yaml").write_text(CONFIG)
    module = cli("fit", "--config", "config.yaml").model
    assert (module.head.num_domains, module.head.score, module.lr) == (4, "sum", 0.1)
    # the first centroid's cosines with the others are 0.8, 0 and -1; they share the 0.3 that is not its own
    row = torch.tensor([0.8, 0.0, -1.0]).double().div(0.1).softmax(0) * 0.3
    torch.testing.assert_close(module.targets.table[0].double(), torch.cat([torch.tensor([0.7]).double(), row]))
    (file,) = Path("checkpoints").glob("*.ckpt")
    loaded = JointModule.load_from_checkpoint(file, weights_only=True)  # the settings are in it: nothing is to be given
    images = batch()[0]
    assert torch.equal(loaded(images), module(images))
    assert torch.equal(loaded.targets.table, module.targets.table)
    cli("test", "--config", "config.yaml", "--ckpt_path", str(file))


def test_other_networks_targets_and_optimizers_in_yaml() -> None:
    settings = yaml.safe_load(CONFIG)
    network = {"class_path": "jdfl_lightning.models.build_backbone", "init_args": {"name": "resnet18", "size": 8}}
    settings["model"] |= {"backbone": network, "in_features": 512, "score": "max"}
    settings["model"]["targets"] = {"class_path": "RandomTargets", "init_args": {"num_domains": 2}}
    settings["optimizer"] = {"class_path": "torch.optim.Adam", "init_args": {"lr": 1e-3}}
    settings["trainer"] |= {"limit_train_batches": 2, "limit_val_batches": 1, "enable_checkpointing": False}
    Path("config.yaml").write_text(yaml.safe_dump(settings))
    ran = cli("fit", "--config", "config.yaml")
    assert ran.model.head.weight.shape == (20, 512)
    assert isinstance(ran.trainer.optimizers[0], torch.optim.Adam)


# --- the module on its own


def test_batches_without_domains() -> None:
    images, labels, domains = batch()
    rules: tuple[TargetRule | None, ...] = (None, RandomTargets(M))
    for rule in rules:
        module = joint_module(rule)
        module.generator = torch.Generator().manual_seed(0)
        module.loss_term = lambda task_loss, features, labels: task_loss
        first = module.training_step((images, labels), 0)
        module.generator.manual_seed(0)
        assert torch.equal(first, module.training_step((images, labels, domains), 0))
    fitting = trainer()
    fitting.fit(joint_module(), batches((images, labels)), batches((images, labels)))
    fitting.test(joint_module(), batches((images, labels)), verbose=False)
    rules = (HardTargets(M), GradedTargets(torch.eye(M)))
    for rule in rules:
        with pytest.raises(ValueError, match="the domains matter"):
            joint_module(rule).training_step((images, labels), 0)
        with pytest.raises(ValueError, match="the domains matter"):
            joint_module(rule).test_step((images, labels), 0)


@pytest.mark.parametrize("score", SCORES)
def test_predictions_of_a_trainer(score: Score) -> None:
    module, (images, labels, _) = joint_module(HardTargets(M), score=score), batch()
    predictor = trainer()
    for loader in (batches(images), batches((images, labels))):
        ((classes, probabilities),) = predictor.predict(module, loader)  # type: ignore[misc]
        logits = module(images)
        assert torch.equal(classes, predict_class(logits, C, score))
        torch.testing.assert_close(probabilities, logits.softmax(1).unflatten(1, (M, C)).sum(1))
