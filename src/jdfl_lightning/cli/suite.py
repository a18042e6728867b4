"""The command `suite`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from jdfl_lightning.cli.program import FAILED, PROGRAM
from jdfl_lightning.core.lists import Names, Numbers
from jdfl_lightning.ui.starting import starting


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
        from jdfl_lightning.cli.report import tell, upload
        from jdfl_lightning.config import parse_experiment
        from jdfl_lightning.core.errors import Interrupted, Terminated
        from jdfl_lightning.core.memory import reuse_memory
        from jdfl_lightning.studies.matrix import Suite
        from jdfl_lightning.studies.suite import Combinations, plan, run_suite
        from jdfl_lightning.ui.display import open_display
        from jdfl_lightning.ui.loggers import WandbRounds

        reuse_memory()
        matrix = Combinations(algorithms, supervisions, seeds, num_domains, unseen)
        folder, runs = plan(partial(parse_experiment, f"{PROGRAM} suite"), settings, matrix)
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
