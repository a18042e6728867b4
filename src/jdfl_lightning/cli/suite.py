"""The command `suite`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jdfl_lightning.core.lists import Names, Numbers


def suite(
    settings: Sequence[str],
    algorithms: Names | None = None,
    supervisions: Names = Names("base,graded,random"),
    seeds: Numbers = Numbers("0,1,2"),
    num_domains: Numbers | None = None,
) -> int:
    """run a matrix of algorithms, supervisions and seeds, or what is left of it, and report on it

    Args:
        settings: of every run; --run_dir is the folder of the suite.
        algorithms: Federated optimizers, such as FedAvg,SCAFFOLD; null for the config's.
        supervisions: Some of base, hard, graded, random.
        seeds: Seeds.
        num_domains: Numbers of pseudo-domains to try, such as 2..7; null for what the settings say.
    """
    from functools import partial

    from rich.console import Console

    from jdfl_lightning.cli.program import FAILED, PROGRAM
    from jdfl_lightning.cli.report import tell, upload
    from jdfl_lightning.config import parse_experiment
    from jdfl_lightning.core.errors import Interrupted, Terminated
    from jdfl_lightning.core.memory import reuse_memory
    from jdfl_lightning.report.write import write_report
    from jdfl_lightning.studies.suite import Combinations, plan, run_suite
    from jdfl_lightning.ui.display import open_display
    from jdfl_lightning.ui.loggers import WandbRounds

    reuse_memory()
    matrix = Combinations(algorithms, supervisions, seeds, num_domains)
    folder, runs = plan(partial(parse_experiment, f"{PROGRAM} suite"), settings, matrix)
    console = Console()
    with open_display(console) as display:
        try:
            outcomes = run_suite(folder, runs, display)
        except KeyboardInterrupt as error:
            kind = Terminated if isinstance(error, Terminated) else Interrupted
            raise kind("the same command") from None
    failed = [outcome for outcome in outcomes if outcome.failure]
    for outcome in failed:
        print(f"{PROGRAM}: {outcome.name} failed: {outcome.failure}", file=sys.stderr)
    if len(failed) < len(outcomes):
        report = write_report([folder], folder / "report")
        tell(report)
        if isinstance(runs[0].logger, WandbRounds):
            upload(report, runs[0].logger)
    return FAILED if failed else 0
