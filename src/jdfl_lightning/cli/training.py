"""Commands around trainings: `validate`, `fit`, `watch`, `discover`, `diagnose`, `suite` and `download`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from jdfl_lightning.cli.program import FAILED, PROGRAM, starting
from jdfl_lightning.cli.runs import tell, upload
from jdfl_lightning.core.errors import Interrupted, Terminated, require
from jdfl_lightning.core.files import as_json
from jdfl_lightning.core.lists import Names, Numbers
from jdfl_lightning.ui.display import open_display
from jdfl_lightning.ui.tables import show_tables

if TYPE_CHECKING:
    from jdfl_lightning.config import Experiment


def _read(command: str, settings: Sequence[str]) -> Experiment:
    """Return the settings of a process that trains."""
    from jdfl_lightning.config import parse_experiment
    from jdfl_lightning.core.system import reuse_memory

    reuse_memory()
    return parse_experiment(f"{PROGRAM} {command}", settings)


def validate(settings: Sequence[str], json: bool = False) -> int:
    """check settings and data as fit does, and estimate memory, bytes and time of a round; trains nothing

    Args:
        settings: of a run.
        json: Print JSON: the data, and the estimates with how each was obtained.
    """
    with starting(settings):
        from jdfl_lightning.data.summary import data_table
        from jdfl_lightning.report.listing import estimates_table
        from jdfl_lightning.studies import validation

        experiment = _read("validate", settings)
    console = Console(stderr=json)
    with open_display(console) as display:
        found = validation.validate(experiment, display)
    if json:
        print(as_json({"valid": True, **asdict(found)}))
    else:
        estimates = {name: (e.value, e.unit, e.how) for name, e in found.estimates.items()}
        show_tables(console, [data_table(found.data), estimates_table(estimates)])
        print("the settings and the data can be used")
    return 0


def fit(settings: Sequence[str]) -> int:
    """run a federated training and leave a run folder (weights, metrics, curves)"""
    with starting(settings):
        from jdfl_lightning.report.details import details_tables
        from jdfl_lightning.report.run import run_table
        from jdfl_lightning.storage.details import read_details
        from jdfl_lightning.studies import run as studies

        experiment = _read("fit", settings)
    console = Console()
    with open_display(console) as display:
        run = studies.fit(experiment, display)
    details = read_details(run.folder)
    show_tables(console, [run_table(run), *([] if details is None else details_tables(details))])
    console.print(f"run folder: {run.folder}", highlight=False, soft_wrap=True)
    return 0


def discover(settings: Sequence[str]) -> int:
    """run Phase 1 alone and show the pseudo-domains; `fit --discovery` reuses them"""
    with starting(settings):
        from jdfl_lightning.config import split_options
        from jdfl_lightning.report.discovery import discovery_tables
        from jdfl_lightning.studies import run as studies
        from jdfl_lightning.supervision import Graded

        experiment = _read("discover", settings)
    console = Console()
    with open_display(console) as display:
        found = studies.discover(experiment, display)
    rule = experiment.supervision if isinstance(experiment.supervision, Graded) else Graded()
    show_tables(console, discovery_tables(found, rule.alpha, rule.tau))
    again = shlex.join([PROGRAM, "fit", *split_options(settings, {"run_dir"})[1], "--discovery", str(found.folder)])
    console.print(f"reuse it with: {again}", highlight=False, markup=False, soft_wrap=True)
    return 0


def diagnose(
    settings: Sequence[str],
    seeds: Numbers = Numbers("0,1,2"),
    batch_sizes: Numbers = Numbers("16,32,64"),
    max_epochs: int = 5,
) -> int:
    """try Phase 1 over E_0, batch sizes, layers and seeds: ARI and how reliably M is found

    Args:
        settings: of a run.
        seeds: Seeds to try.
        batch_sizes: Batch sizes to try.
        max_epochs: E_0 is tried from 1 to this.
    """
    with starting(settings):
        from jdfl_lightning.report.details import diagnosis_tables
        from jdfl_lightning.studies.diagnose import Sweep
        from jdfl_lightning.studies.diagnose import diagnose as sweep_over

        experiment = _read("diagnose", settings)
    console = Console()
    with open_display(console) as display:
        folder = sweep_over(experiment, Sweep(seeds, batch_sizes, max_epochs), display).folder
    show_tables(console, diagnosis_tables(folder))
    console.print(f"folder: {folder}", highlight=False, soft_wrap=True)
    return 0


def suite(
    settings: Sequence[str],
    algorithms: Names | None = None,
    supervisions: Names = Names("base,graded,random"),
    seeds: Numbers = Numbers("0,1,2"),
    num_domains: Numbers | None = None,
    unseen: Names | None = None,
) -> int:
    """run a matrix of algorithms, supervisions and seeds, or what is left of it, and report on it

    Args:
        settings: of every run; --run_dir is the folder of the suite.
        algorithms: Federated optimizers, such as FedAvg,SCAFFOLD; null for the config's.
        supervisions: Some of base, hard, graded, random, uniform, em, online, or import paths of your own.
        seeds: Seeds.
        num_domains: Numbers of pseudo-domains to try, such as 2..7; null for what the settings say.
        unseen: Domains to leave out, a run for each, such as photo,sketch; each for all; null for the settings' own.
    """
    with starting(settings):
        from jdfl_lightning.studies.suite import Combinations, Suite, plan, run_suite
        from jdfl_lightning.ui.loggers import WandbRounds

        matrix = Combinations(algorithms, supervisions, seeds, num_domains, unseen)
        folder, runs = plan(partial(_read, "suite"), settings, matrix)
    with open_display(Console()) as display:
        try:
            done = Suite(folder, run_suite(folder, runs, display))
        except KeyboardInterrupt as error:
            kind = Terminated if isinstance(error, Terminated) else Interrupted
            raise kind("the same command") from None
    for name, failure in done.failures.items():
        print(f"{PROGRAM}: {name} failed: {failure}", file=sys.stderr)
    if len(done.failures) < len(done.outcomes):
        report = done.report()
        if isinstance(runs[0].logger, WandbRounds):
            upload(report, runs[0].logger)
        tell(report)
    return FAILED if done.failures else 0


def download(data: str, root: Path) -> int:
    """fetch a data set that the package knows into a folder, and check it

    Args:
        data: PACS or OfficeCaltech.
        root: Folder of the images, new or empty; one that has them already is checked. Pass it as --data.root.
    """
    with starting():
        from jdfl_lightning.core.errors import require_choice, subclasses
        from jdfl_lightning.data.folder import KnownDomains

    known = {kind.__name__: kind for kind in subclasses(KnownDomains) if kind.__module__.startswith("jdfl_lightning.")}
    require_choice("--data", data, list(known))
    images = known[data](root=str(root), download=True)
    with open_display(Console()) as display:
        images.progress = display.step
        images.fetch()
        tree = images.find(Path(root))
    for domain, classes in tree.items():
        counts = [len(files) for files in classes.values()]
        differs = "" if tuple(counts) == images.counts[domain] else f" ({sum(images.counts[domain]):,} as published)"
        print(f"{domain}: {sum(counts):,} images of {len(counts)} classes{differs}")
    print(f"--data {data} --data.root {root}")
    return 0


def watch(runs: list[Path], port: int = 0) -> int:
    """serve a page with a run's curves and discovery, on this machine alone, while it trains; Ctrl-C ends it

    Args:
        runs: The run folder.
        port: Port of the page; 0 for any that is free.
    """
    from jdfl_lightning.studies.watch import WatchServer

    require(len(runs) == 1, "RUNS", "one run folder", len(runs))
    with WatchServer(runs[0], port) as server:
        print(f"{server.url} shows {runs[0]}; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
