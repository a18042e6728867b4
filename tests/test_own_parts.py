"""A client is Lightning's and the user's: optimizers, schedulers, the Trainer's options, modules, callbacks."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel

from helpers import contents, experiment, finished, same, targets
from jdfl_lightning import (
    SCAFFOLD,
    Agreement,
    Clustering,
    EarlyStopping,
    Experiment,
    FedAvg,
    LocalUpdate,
    PoolBackend,
    Run,
    TrainerOptions,
    evaluate,
    fit,
    to_input,
)
from jdfl_lightning.client.build import round_factor
from jdfl_lightning.client.fit import Workspace, fit_client, train
from jdfl_lightning.client.trainer import REFUSED
from jdfl_lightning.config import as_dict, parse_experiment
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.messages import FitResult, FitTask
from jdfl_lightning.core.parts import Part
from jdfl_lightning.core.tensors import Tensors
from jdfl_lightning.server.resume import check_same
from jdfl_lightning.storage.weights import load_model
from own_parts import Always, FixedSize, Narrow, Neck, OwnRate, Smooth, halved
from pages import ROOT, read

COSINE = Part(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=4)


def one_fit(run: Experiment, round: int = 1) -> tuple[Tensors, FitResult]:
    workspace = Workspace(run)
    weights, buffers = workspace.initial(3)
    task = FitTask(1, round, run.seed_everything, weights, buffers, domain=2, learned=targets(torch.eye(3)))
    return weights, fit_client(workspace, task, run.algorithm.init_client(weights))[0]


def by_hand(run: Experiment, round: int, rates: list[float], parts: Any) -> Tensors:
    """The same fit as a plain loop: the module's own steps, batches and loss, an optimizer made by `parts`."""
    from jdfl_lightning.core.seeding import isolated_randomness, torch_generator

    workspace = Workspace(run)
    weights, buffers = workspace.initial(3)
    module = workspace.module(weights, buffers, run.supervision.rule({"table": torch.eye(3)}, 2))
    loader = run.data.client_loader(1, 2, run.batch_size, torch_generator(0, "shuffle", round, 1))
    optimizer = parts(list(module.parameters()))
    module.loss_term = lambda loss, features, labels: loss
    with isolated_randomness(0, "fit", round, 1):
        for rate in rates:
            for group in optimizer.param_groups:
                group["lr"] = rate
            for number, batch in enumerate(loader):
                optimizer.zero_grad()
                module.training_step(batch, number).backward()
                optimizer.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def close(result: FitResult, expected: Tensors) -> None:
    for name, tensor in result.weights.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-5)


def test_any_optimizer_with_a_schedule() -> None:
    """AdamW with a cosine over 4 epochs: the rates are lr (1 + cos(pi e / 4)) / 2."""
    optimizer = Part(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    run = experiment(supervision="hard", epochs=3, optimizer=optimizer, lr_scheduler=COSINE)
    rates = [0.01 * (1 + torch.cos(torch.tensor(torch.pi * e / 4)).item()) / 2 for e in range(3)]
    _, result = one_fit(run)
    close(result, by_hand(run, 1, rates, lambda p: torch.optim.AdamW(p, weight_decay=0.1)))


def test_short_forms_of_the_optimizers_options() -> None:
    adam = Part(torch.optim.AdamW, betas=[0.8, 0.9])
    assert experiment(optimizer=adam).local_optimizer == adam  # its own default rate, not SGD's
    assert experiment(optimizer=adam, lr=0.3).local_optimizer == Part(torch.optim.AdamW, betas=[0.8, 0.9], lr=0.3)
    assert experiment().local_optimizer == Part(torch.optim.SGD, lr=0.05)
    assert experiment(lr=0.2, momentum=0.9).local_optimizer == Part(torch.optim.SGD, lr=0.2, momentum=0.9)
    with pytest.raises(InputError, match="--momentum to be 0 with AdamW, which has none"):
        experiment(optimizer=adam, momentum=0.9)
    with pytest.raises(InputError, match=r"--lr to be left out, as --optimizer\.lr is given"):
        experiment(optimizer=Part(torch.optim.AdamW, lr=0.1), lr=0.2)


def test_a_rate_over_the_rounds() -> None:
    """0.5^(t-1): in round 3 a quarter of the rate."""
    halves = Part(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    assert [round_factor(halves, t, lr=0.5) for t in (1, 2, 3)] == [1.0, 0.5, 0.25]
    run = experiment(supervision="hard", lr=0.2, round_scheduler=halves)
    _, result = one_fit(run, round=3)
    close(result, by_hand(run, 3, [0.05], torch.optim.SGD))


def test_scaffold_divides_by_the_rates_really_used() -> None:
    """Each parameter's own sum: a schedule, a slower head, gradients accumulated over two batches."""
    options = TrainerOptions(accumulate_grad_batches=2)
    common: dict[str, Any] = {"epochs": 2, "lr": 0.1, "head_lr": 0.5, "lr_scheduler": COSINE, "trainer": options}
    run = experiment(supervision="hard", algorithm=SCAFFOLD(), batch_size=96, **common)
    workspace = Workspace(run)
    weights, buffers = workspace.initial(3)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    task = FitTask(1, 1, 0, weights, buffers, {"c": zeros}, domain=2, learned=targets(torch.eye(3)))
    result, state = fit_client(workspace, task, {"c": zeros})
    steps = -(-len(run.data.client_loader(1, 0, run.batch_size, torch.Generator())) // 2)
    assert result.num_steps == 2 * steps
    total = steps * 0.1 * (1 + (1 + torch.cos(torch.tensor(torch.pi / 4)).item()) / 2)
    for name, tensor in state["c"].items():
        rate = total * (0.5 if name.startswith("head.") else 1.0)
        torch.testing.assert_close(tensor, (weights[name] - result.weights[name]) / rate, atol=1e-6, rtol=1e-4)


def test_the_mean_loss_under_accumulation() -> None:
    """Lightning divides the loss by the number of accumulated batches; what is reported is the loss of a sample."""
    common: dict[str, Any] = {"supervision": "hard", "lr": 1e-9, "batch_size": 96}
    losses = [one_fit(experiment(**common, trainer=TrainerOptions(accumulate_grad_batches=n)))[1] for n in (1, 3)]
    assert losses[0].metrics["train/loss"] == pytest.approx(losses[1].metrics["train/loss"], rel=1e-5)


def test_scaffold_needs_plain_sgd() -> None:
    with pytest.raises(InputError, match="--optimizer to be SGD with SCAFFOLD, which its formulas assume, but got"):
        experiment(algorithm=SCAFFOLD(), optimizer=Part(torch.optim.Adam))
    with pytest.raises(InputError, match="--momentum to be 0 with SCAFFOLD"):
        experiment(algorithm=SCAFFOLD(), optimizer=Part(torch.optim.SGD, lr=0.1, momentum=0.9))

    class Adamant(LocalUpdate):
        needs_plain_sgd = True

    class Adaptive(BoringModel):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    module = Adaptive()
    update = Adamant(FitTask(0, 1, 0, {}), {})
    with pytest.raises(InputError, match=r"Expected plain SGD, as the algorithm's formulas assume, but .* Adam"):
        train(module, module.train_dataloader(), update, 1, TrainerOptions())


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"limit_train_batches": 2}, 4), ({"max_steps": 3}, 3), ({"limit_train_batches": 0.5}, None), ({}, None)],
)
def test_shorter_fits(options: dict[str, Any], steps: int | None) -> None:
    run = experiment(epochs=2, supervision="hard", batch_size=96, trainer=TrainerOptions(**options))
    batches = len(run.data.client_loader(1, 0, run.batch_size, torch.Generator()))
    expected = steps or 2 * int(batches * options.get("limit_train_batches", 1))
    assert one_fit(run)[1].num_steps == expected


def test_a_quick_trial() -> None:
    run = experiment(rounds=7, epochs=5, trainer=TrainerOptions(fast_dev_run=True), run_dir="trial")
    assert (run.rounds, run.epochs) == (1, 1)
    assert one_fit(run)[1].num_steps == 1
    assert len(fit(run).rows) == 1


def test_names_of_a_precision() -> None:
    for name, full in (("32", "32-true"), ("bf16", "bf16-mixed"), ("16", "16-mixed"), ("64", "64-true")):
        found = parse_experiment("fit", ["--trainer.precision", name]).trainer.precision
        assert found == full
    assert TrainerOptions(precision="bf16") == TrainerOptions(precision="bf16-mixed")


def test_every_option_of_the_trainer_is_taken_or_refused_with_a_reason() -> None:
    known = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    taken = {field.name for field in fields(TrainerOptions)}
    assert known == (taken | set(REFUSED)) & known
    assert not taken & set(REFUSED)
    with pytest.raises(InputError, match=r"--trainer\.max_epochs is not an option of a run: use --epochs"):
        parse_experiment("fit", ["--trainer.max_epochs", "3"])
    Path("mine.yaml").write_text("rounds: 2\ntrainer:\n  strategy: ddp\n")
    with pytest.raises(InputError, match=r"mine\.yaml, line 3: trainer\.strategy .* a client trains on one device"):
        parse_experiment("fit", ["--config", "mine.yaml"])


def test_callbacks_are_built_for_each_fit() -> None:
    Path("marks").mkdir()
    mark = Part("own_parts.Mark", folder=str(Path("marks").absolute()))
    run = fit(experiment(epochs=2, supervision="base", trainer=TrainerOptions(callbacks=[mark]), run_dir="run"))
    assert sorted(file.name for file in Path("marks").iterdir()) == sorted(f"{n}-2" for n in range(8))
    saved = run.config["trainer"]["callbacks"]
    assert saved == [{"class_path": "own_parts.Mark", "init_args": {"folder": str(Path("marks").absolute())}}]
    with pytest.raises(InputError, match=r"--trainer\.callbacks to be a Callback but torch\.optim\.sgd\.SGD is not"):
        TrainerOptions(callbacks=[Part(torch.optim.SGD)])


def test_an_own_module() -> None:
    """Its augmentation draws from (seed, round, client), its metric is a column, its arguments are in the config."""
    settings: dict[str, Any] = {"model": Part(Smooth, noise=0.5), "rounds": 2, "client_fraction": 0.5}
    first = finished("first", **settings)
    cut = experiment(**(settings | {"rounds": 1}), run_dir="cut")
    fit(cut)
    fit(replace(cut, rounds=2, run_dir=None, resume="cut"))
    assert same("first", "cut")
    assert all(row["train/twice"] == pytest.approx(2 * row["train/loss"], rel=1e-4) for row in first.rows)
    assert first.config["model"] == {"class_path": "own_parts.Smooth", "init_args": {"noise": 0.5}}
    assert not same("first", str(finished("plain", rounds=2, client_fraction=0.5).folder))
    with pytest.raises(InputError, match=r"--model\.nose: it has noise.* Did you mean 'noise'"):
        experiment(model=Part(Smooth, nose=0.5))
    with pytest.raises(InputError, match="--model to be a JointModule"):
        experiment(model=Part(torch.optim.SGD))
    with pytest.raises(InputError, match="--trainer to be of type TrainerOptions"):
        experiment(trainer={"precision": "32"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"model": Part(Smooth, noise=0.5), "client_fraction": 0.5},
        {"model": Part(Neck, width=6), "trainer": TrainerOptions(precision="64-true")},
    ],
    ids=["module", "network"],
)
def test_own_modules_in_a_pool(settings: dict[str, Any]) -> None:
    finished("local", **settings)
    fit(experiment(**settings, backend=PoolBackend(workers=2), run_dir="pool"))
    assert same("local", "pool")


def test_an_own_network() -> None:
    """Statistics and frozen parameters of its own layers are the run's: the same on resume, and saved."""
    settings: dict[str, Any] = {"model": Part(Neck, width=6), "trainer": TrainerOptions(precision="64-true")}
    first = Run.read(fit(experiment(**settings, run_dir="first"), progress=False).folder)
    cut = experiment(**settings, rounds=1, run_dir="cut")
    fit(cut, progress=False)
    fit(replace(cut, rounds=2, run_dir=None, resume="cut"), progress=False)
    assert same("first", "cut")
    saved = load_model(first.folder, "last")
    assert {"neck.1.running_mean", "scale"} <= set(saved.buffers)
    assert evaluate(first, progress=False).loc["last", "test/acc"] == first.last["test/acc"]
    data, model = experiment().data, first.model("last").double()
    data.deal(0)
    with torch.no_grad():
        right = [model.head.predict(model(x.double())) == y for x, y, _ in data.test_dataloader()]
    assert torch.cat(right).double().mean().item() == pytest.approx(first.last["test/acc"], abs=1e-6)
    logits = model(to_input(data.images[:4]).double())
    expected = model.head.class_probabilities(logits)[torch.arange(4), model.head.predict(logits)]
    assert first.predict(data.images[:4], "last")["probability"].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_an_own_network_of_a_stranger_is_not_imported() -> None:
    run = Run.read(finished("run", model=Part(Neck), backbone="PaperCNN").folder)
    assert run.model().class_names == run.model(trust=True).class_names
    config = run.folder / "config.yaml"
    config.write_bytes(config.read_bytes().partition(b"\n")[2])
    with pytest.raises(InputError, match=r"names own_parts\.Neck, which would be imported"):
        run.model()
    trained_otherwise = finished("smooth", model=Part(Smooth))
    assert load_model(trained_otherwise.folder, "last").header.model is None  # used without its class


def test_a_module_that_takes_too_little() -> None:
    with pytest.raises(
        InputError, match=r"own_parts\.Narrow failed: TypeError: .*in_features.*super\(\)\.__init__\(\*\*rest"
    ):
        Workspace(experiment(model=Part(Narrow)))


def test_the_rate_of_a_module_is_the_runs() -> None:
    """--model.lr would have no effect; a module that makes its optimizer itself has --lr in self.lr."""
    with pytest.raises(InputError, match=r"--model without lr, which the run supplies"):
        experiment(model=Part(Smooth, lr=0.1))
    with pytest.raises(InputError, match=r"--model without lr, which the run supplies"):
        parse_experiment("fit", ["--model", "own_parts.Smooth", "--model.lr", "0.1"])
    _, half = one_fit(experiment(lr=0.1))
    _, own = one_fit(experiment(model=Part(OwnRate), lr=0.2))
    assert all(torch.equal(half.weights[name], own.weights[name]) for name in half.weights)


def test_a_backbone_with_arguments() -> None:
    run = finished("run", backbone="own_parts.WideNet", backbone_args={"width": 7})
    assert load_model(run.folder, "last").header.backbone_args == {"width": 7}
    assert load_model(run.folder, "last").weights["backbone.1.weight"].shape == (7, 192)
    given = ["--backbone", "own_parts.WideNet", "--backbone_args", '{"width": 9}']
    assert parse_experiment("fit", given).backbone_args == {"width": 9}
    with pytest.raises(InputError, match=r"own_parts\.WideNet\(8, wide=9\) failed"):
        Workspace(experiment(backbone="own_parts.WideNet", backbone_args={"wide": 9}))


def test_an_own_criterion() -> None:
    run = finished("run", num_domains=None, clustering=Clustering(criterion=Always(2)))
    assert run.discovery is not None
    assert (run.discovery["num_domains"], run.discovery["criterion"]) == (2, "Always")
    given = ["--clustering.criterion", "own_parts.Always", "--clustering.criterion.number", "4"]
    assert parse_experiment("fit", given).clustering.criterion == Always(4)
    with pytest.raises(InputError, match="chose 99"):
        fit(experiment(num_domains=None, clustering=Clustering(criterion=Always(99)), run_dir="bad"))


def test_options_win_over_configs_wherever_they_stand() -> None:
    Path("mine.yaml").write_text("rounds: 7\nlr: 0.3\n")
    run = parse_experiment("fit", ["--rounds", "3", "--config", "mine.yaml"])
    assert (run.rounds, run.lr) == (3, 0.3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds: 2\nroudns: 3\n", r"mine\.yaml, line 2: there is no setting 'roudns'\. Did you mean 'rounds'\?"),
        ("clustering:\n  epoch: 3\n", r"mine\.yaml, line 2: there is no setting 'clustering\.epoch'\. Did you mean"),
        ("rounds: 2\n\nlr: fast\n", r"--lr to be of type float .* \(mine\.yaml, line 3\)"),
        ("data:\n  class_path: PACS\n  init_args:\n    size: x\n", r"--data\.size .*\(mine\.yaml, line 4\)"),
        ("data:\n  class_path: PACS\n  init_args:\n    sice: 8\n", r"no --data\.sice.*size.*\(mine\.yaml, line 4\)"),
        ("data:\n  class_path: PACS\n  sice: 8\n", r"mine\.yaml, line 3: 'sice' is beside a class_path"),
        ("optimizer:\n  class_path: Adam\n  init_args: {lrr: 1}\n", r"--optimizer\.lrr.*\(mine\.yaml, line 3\)"),
        ("lr: 1\nlr_scheduler: StepLR\n", r"--lr_scheduler\.step_size: StepLR needs it\. \(mine\.yaml, line 2\)"),
        ("callbacks:\n- class_path: EarlyStopping\n  init_args:\n    patience: x\n", r"patience .*yaml, line 4\)"),
        (
            "trainer:\n  callbacks:\n  - class_path: own_parts.Mark\n    init_args: {fol: x}\n",
            r"\.fol: .*yaml, line 4\)",
        ),
        ("lr: 1\nrounds: -1\n", r"--rounds to be positive .*\(mine\.yaml, line 2\)"),
        ("algorithm: SCAFFOLD\nmomentum: 0.9\n", r"--momentum to be 0 .*\(mine\.yaml, line 2\)"),
        ("data:\n  class_path: PACS\n  init_args:\n    augment: [Flp]\n", r"--data\.augment: .*yaml, line 4\)"),
    ],
)
def test_a_wrong_key_is_found(text: str, message: str) -> None:
    Path("mine.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        parse_experiment("fit", ["--config", "mine.yaml"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--optimizer", "AdamWW"], r"Did you mean AdamW\? Known names: .*SGD"),
        (["--optimizer", "AdamW", "--optimizer.lrr", "1"], r"no --optimizer\.lrr\. Did you mean lr\? It has lr, betas"),
        (["--algorithm", "SCAFOLD"], r"Did you mean SCAFFOLD\? Known names: .*SCAFFOLD"),
        (
            ["--supervision", "gradd"],
            r"Did you mean graded\? Known names: base, hard, graded, random, uniform, em, online",
        ),
        (["--roudns", "3"], r"There is no option --roudns\. Did you mean --rounds\?"),
        (["--confg", "digits"], r"There is no option --confg\. Did you mean --config\?"),
        (["rounds", "3"], r"Expected an option, as in --rounds, but got 'rounds'"),
        (["--lr_scheduler", "CosineAnnealingLR"], r"^Expected --lr_scheduler\.T_max: CosineAnnealingLR needs it\.$"),
        (
            ["--lr_scheduler", "torch.optim.lr_scheduler.ReduceLROnPlateau"],
            r"--lr_scheduler to be a schedule without a metric",
        ),
        (["--lr_scheduler", "Stepp"], r"Known names: LambdaLR"),
        (["--lr_scheduler.step_size", "1", "--lr_scheduler", "StepLR"], r"--lr_scheduler is given after its option"),
        (["--data.root", "x"], r"has no --data\.root\. It has size, .*: --data ImageFolderDomains\.$"),
        (["--supervision", "own_parts.Halvs"], r"^--supervision: .*own_parts has no Halvs\. Did you mean 'Halves'\?$"),
        (["--model", "own_parts.Neckk"], r"^--model: .*own_parts has no Neckk\. Did you mean 'Neck'\?$"),
        (["--model", "own_parts.Mark"], r"^Expected --model to be a JointModule but own_parts\.Mark is not\.$"),
        (
            ["--supervision", "own_parts.Mark"],
            r"^Expected --supervision to be a Supervision but own_parts\.Mark is not",
        ),
        (["--supervision", "nowhere.Rule"], r"^--supervision: .*there is no module nowhere\.$"),
        (["--trainer.callbacks+=own_parts.Mak"], r"^--trainer\.callbacks: .*Did you mean 'Mark'\?$"),
        (["--trainer.callbacks.folder", "x"], r"--trainer\.callbacks\.folder after --trainer\.callbacks\+=NAME"),
        (["--callbacks+=EarlyStoping"], r"Did you mean EarlyStopping\? Known names: (?!.*RunJournal)"),
    ],
)
def test_words_that_help(args: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_experiment("fit", args)


def test_a_line_is_only_named_if_it_is_the_reason() -> None:
    """An option wins over a config, so that the config's line has nothing to do with its value."""
    Path("mine.yaml").write_text("rounds: 7\ndata:\n  class_path: DigitsDomains\n")
    for args in (["--rounds", "many"], ["--data.sice=8"], ["--data", "Digitz"]):
        with pytest.raises(InputError) as raised:
            parse_experiment("fit", ["--config", "mine.yaml", *args])
        assert "mine.yaml" not in str(raised.value)


def test_one_class_for_a_list() -> None:
    """As in LightningCLI: one class without a list, and the options of the last one."""
    mark, timer = Part("own_parts.Mark", folder="x"), Part("lightning.pytorch.callbacks.Timer", interval="epoch")
    args = ["--callbacks", "EarlyStopping", "--callbacks.patience", "3", "--regularizers=Agreement"]
    args += ["--trainer.callbacks", "own_parts.Mark", "--trainer.callbacks.folder=x"]
    args += ["--trainer.callbacks+=Timer", "--trainer.callbacks.interval", "epoch"]
    run = parse_experiment("fit", args)
    assert run.callbacks == [EarlyStopping(patience=3)]
    assert run.regularizers == [Agreement()]
    assert run.trainer.callbacks == [mark, timer]
    Path("mine.yaml").write_text(
        "callbacks: EarlyStopping\nregularizers: {class_path: Agreement}\n"
        "trainer:\n  callbacks: {class_path: own_parts.Mark, init_args: {folder: x}}\n"
    )
    run = parse_experiment("fit", ["--config", "mine.yaml", "--trainer.callbacks+=Timer"])
    assert (run.callbacks, run.regularizers) == ([EarlyStopping()], [Agreement()])
    assert run.trainer.callbacks == [mark, Part("lightning.pytorch.callbacks.Timer")]
    assert parse_experiment("fit", ["--config", "mine.yaml", "--trainer.callbacks", "[]"]).trainer.callbacks == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": Part("torch.optim.Adam", lr=-1.0)}, "Invalid learning rate"),
        ({"optimizer": Part("own_parts.Matrices"), "backbone": "PaperCNN"}, "only supports 2D parameters"),
        ({"lr_scheduler": Part("torch.optim.lr_scheduler.OneCycleLR", max_lr=1.0)}, "total_steps"),
        ({"round_scheduler": Part("torch.optim.lr_scheduler.MultiStepLR", milestones=3)}, "TypeError"),
    ],
)
def test_an_optimizer_that_cannot_be_built_leaves_no_folder(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"--optimizer, --lr_scheduler and --round_scheduler .*{message}"):
        fit(experiment(**settings, run_dir="run"), progress=False)
    assert not Path("run").exists()


def test_parts_in_a_config_come_back(tmp_path: Path) -> None:
    run = experiment(
        optimizer=Part(torch.optim.AdamW, betas=(0.8, 0.9)),
        lr_scheduler=COSINE,
        round_scheduler=Part("torch.optim.lr_scheduler.ExponentialLR", gamma=0.998),
        model=Part(Smooth, noise=0.3),
        trainer=TrainerOptions(callbacks=[Part("lightning.pytorch.callbacks.LearningRateMonitor")]),
        algorithm=FedAvg(),
    )
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(as_dict(run)))
    again = parse_experiment("fit", ["--config", str(file)])
    assert as_dict(again) == as_dict(run)
    check_same(again, tmp_path)


def test_a_data_module_that_fixes_an_argument_of_its_base_comes_back() -> None:
    """Its `**options` do not stand for the argument that it gives itself."""
    run = experiment(data=FixedSize(num_clients=4, val_fraction=0.2))
    saved = as_dict(run)["data"]["init_args"]
    assert (saved["num_clients"], saved["val_fraction"], "size" in saved) == (4, 0.2, False)
    again = parse_experiment("fit", [], as_dict(run))
    assert as_dict(again) == as_dict(run)
    assert again.data.size == 8


def test_a_function_as_an_argument(tmp_path: Path) -> None:
    """It is kept by its import path, so that a config has it and a resumed run finds it."""
    given = ["--round_scheduler", "LambdaLR", "--round_scheduler.lr_lambda", "own_parts.halved"]
    run = parse_experiment("fit", given)
    part = Part(torch.optim.lr_scheduler.LambdaLR, lr_lambda=halved)
    assert run.round_scheduler == part == Part("torch.optim.lr_scheduler.LambdaLR", lr_lambda="own_parts.halved")
    assert [round_factor(run.round_scheduler, number, lr=0.5) for number in (1, 2, 4)] == [1, 0.5, 0.125]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(as_dict(run)))
    assert parse_experiment("fit", ["--config", str(file)]).round_scheduler == part
    for value in (lambda round: 1.0, torch.zeros(1)):
        with pytest.raises(InputError, match="lr_lambda to be plain values or an importable function"):
            Part(torch.optim.lr_scheduler.LambdaLR, lr_lambda=value)


def test_a_part_says_what_it_cannot_do() -> None:
    with pytest.raises(InputError, match="there is no module nowhere"):
        Part("nowhere.Thing")
    with pytest.raises(InputError, match=r"torch\.optim has no SDG\. Did you mean 'SGD'\?"):
        Part("torch.optim.SDG")
    with pytest.raises(InputError, match="the import path of a class"):
        Part("SGD")
    with pytest.raises(InputError, match=r"--lr_scheduler\.T_max: CosineAnnealingLR needs it"):
        experiment(lr_scheduler=Part(torch.optim.lr_scheduler.CosineAnnealingLR))
    assert Part("torch.optim.SGD") == Part(torch.optim.SGD, momentum=0)
    assert hash(Part("torch.optim.SGD")) == hash(Part(torch.optim.SGD))


@pytest.mark.slow
def test_the_page_of_own_parts_runs_in_a_pool_and_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One YAML of at most 40 lines, six parts of the user's, two workers; killed after round 2: the same to the bit.

    Most images are held out: augmentation takes them one by one.
    """
    blocks = [block.text for block in read(ROOT / "docs" / "own_parts.md") if block.kind in ("python", "yaml")]
    code, config = blocks
    assert len(config.splitlines()) <= 40
    Path("parts.py").write_text(code)
    Path("mine.yaml").write_text(config)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    page = ["--config", "mine.yaml", "--data.test_fraction", "0.9", "--data.size", "8"]
    fit(parse_experiment("fit", [*page, "--run_dir", "whole"]))
    fit(parse_experiment("fit", [*page, "--run_dir", "cut", "--rounds", "2"]))
    fit(parse_experiment("fit", ["--resume", "cut", "--rounds", "4"]))
    assert same("whole", "cut")
    fit(parse_experiment("fit", [*page, "--run_dir", "alone", "--backend", "LocalBackend"]))
    assert same("whole", "alone")
    rows = contents("whole")["rows"]
    assert [row["train/epochs"] for row in rows] == ["2.0"] * 4
