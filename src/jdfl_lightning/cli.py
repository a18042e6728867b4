"""The command line: commands -> functions."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from jdfl_lightning.core.errors import InputError, Interrupted, Note, Terminated, plain
from jdfl_lightning.core.nursery import nursery

if TYPE_CHECKING:
    from jdfl_lightning.report.write import Report
    from jdfl_lightning.ui.loggers import WandbRounds

PROGRAM = "jdfl-lightning"
FAILED, BAD_INPUT, INTERRUPTED, CLOSED_PIPE, TERMINATED = 1, 2, 130, 141, 143
_LONGEST = 2000
"""Letters of a message, which may quote somebody's file."""


def _fit(args: Sequence[str]) -> int:
    """run a federated training and leave a run folder (weights, metrics, curves)"""
    with nursery(spare=True) if _may_use_workers(args) else nullcontext():  # imports while this process does
        from rich.console import Console

        from jdfl_lightning.config import parse_experiment
        from jdfl_lightning.core.memory import reuse_memory
        from jdfl_lightning.report.run import run_table
        from jdfl_lightning.server.run import fit
        from jdfl_lightning.ui.display import open_display

        reuse_memory()
        experiment = parse_experiment(f"{PROGRAM} fit", args)
        console = Console()
        with open_display(console) as display:
            run = fit(experiment, display)
    console.print(run_table(run))
    console.print(f"run folder: {run.folder}", highlight=False, soft_wrap=True)
    return 0


def _may_use_workers(args: Sequence[str]) -> bool:
    """Guess, before anything is imported that would know, whether clients will train in worker processes."""
    several = (os.cpu_count() or 1) > 1 and os.environ.get("OMP_NUM_THREADS") != "1"
    wanted = any(arg.startswith("--backend.workers") for arg in args)
    other = any(re.search("(Local|Ray)Backend", arg) or arg in ("-h", "--help") for arg in args)
    return os.name == "posix" and (several or wanted) and not other


def _discover(args: Sequence[str]) -> int:
    """run Phase 1 alone and show the pseudo-domains; `fit --discovery` takes them up"""
    with nursery(spare=True) if _may_use_workers(args) else nullcontext():
        from rich.console import Console

        from jdfl_lightning.config import parse_experiment
        from jdfl_lightning.core.memory import reuse_memory
        from jdfl_lightning.report.discovery import discovery_tables
        from jdfl_lightning.server.run import discover
        from jdfl_lightning.storage.folder import read_discovery
        from jdfl_lightning.ui.display import open_display

        reuse_memory()
        experiment = parse_experiment(f"{PROGRAM} discover", args)
        console = Console()
        with open_display(console) as display:
            folder = discover(experiment, display)
    for table in discovery_tables(read_discovery(folder), experiment.alpha, experiment.tau):
        console.print(table)
    console.print(f"take it up with: {PROGRAM} fit --discovery {folder}", highlight=False, soft_wrap=True)
    return 0


def _diagnose(args: Sequence[str]) -> int:
    """try Phase 1 over E_0, batch sizes, layers and seeds: ARI and how reliably M is found"""
    with nursery(spare=True) if _may_use_workers(args) else nullcontext():
        parser = _parser("diagnose")
        parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2], metavar="0,1,2", help="seeds to try")
        parser.add_argument(
            "--batch_sizes", type=_numbers, default=[16, 32, 64], metavar="16,32,64", help="batch sizes to try"
        )
        parser.add_argument("--max_epochs", type=int, default=5, metavar="5", help="E_0 is tried from 1 to this")
        parser.epilog = f"All other options are those of {PROGRAM} fit --help."
        options, others = parser.parse_known_args(args)

        from rich.console import Console

        from jdfl_lightning.config import parse_experiment
        from jdfl_lightning.core.memory import reuse_memory
        from jdfl_lightning.report.diagnosis import diagnosis_tables
        from jdfl_lightning.studies.diagnose import Sweep, diagnose
        from jdfl_lightning.ui.display import open_display

        reuse_memory()
        experiment = parse_experiment(f"{PROGRAM} diagnose", others)
        sweep = Sweep(options.seeds, options.batch_sizes, options.max_epochs)
        console = Console()
        with open_display(console) as display:
            folder = diagnose(experiment, sweep, display)
    for table in diagnosis_tables(folder):
        console.print(table)
    console.print(f"folder: {folder}", highlight=False, soft_wrap=True)
    return 0


def _suite(args: Sequence[str]) -> int:
    """run a matrix of algorithms, supervisions and seeds, or what is left of it, and report on it"""
    with nursery(spare=False) if _may_use_workers(args) else nullcontext():
        parser = _parser("suite")
        parser.add_argument(
            "--algorithms", type=_names, metavar="FedAvg,SCAFFOLD", help="federated optimizers; default: the config's"
        )
        parser.add_argument(
            "--supervisions",
            type=_names,
            default=["base", "graded", "random"],
            metavar="base,graded,random",
            help="base, hard, graded, random",
        )
        parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2], metavar="0,1,2", help="seeds")
        parser.add_argument("--num_domains", type=_numbers, metavar="2..7", help="numbers of pseudo-domains to try")
        parser.epilog = (
            "All other options are those of fit, for every run; --run_dir is the folder of the suite "
            "(default: runs/suite- and the config's name). The same command goes on with a suite that was cut off."
        )
        options, others = parser.parse_known_args(args)

        from functools import partial

        from rich.console import Console

        from jdfl_lightning.config import parse_experiment
        from jdfl_lightning.core.memory import reuse_memory
        from jdfl_lightning.report.write import PAGE, write_report
        from jdfl_lightning.studies.suite import Matrix, plan, run_suite
        from jdfl_lightning.ui.display import open_display
        from jdfl_lightning.ui.loggers import WandbRounds

        reuse_memory()
        matrix = Matrix(options.algorithms, options.supervisions, options.seeds, options.num_domains)
        folder, runs = plan(partial(parse_experiment, f"{PROGRAM} suite"), others, matrix)
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
        print(f"runs compared: {report.num_runs}, left out: {len(report.left_out)}; see {report.folder / PAGE}")
        if isinstance(runs[0].logger, WandbRounds):
            _upload(report, runs[0].logger)
    return FAILED if failed else 0


def _names(text: str) -> list[str]:
    """Return words that are separated by commas."""
    return [part.strip() for part in text.split(",")]


def _numbers(text: str) -> list[int]:
    """Return numbers that are separated by commas, or all from one to another: 2..7."""
    first, dots, last = text.partition("..")
    try:
        return list(range(int(first), int(last) + 1)) if dots else [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers such as 0,1,2 or 2..7 but got {text!r}") from None


def _test(args: Sequence[str]) -> int:
    """evaluate the saved weights of a run again"""
    from rich.console import Console

    from jdfl_lightning.config import parse_experiment, settings_argument
    from jdfl_lightning.report.run import accuracy_table
    from jdfl_lightning.storage.folder import read_run
    from jdfl_lightning.studies.inference import test_run
    from jdfl_lightning.ui.display import open_display

    parser = _parser("test")
    _add_run(parser)
    parser.add_argument("--data.root", dest="root", metavar="DIR", help="the images, if they have moved since the run")
    options = parser.parse_args(args)
    run = read_run(options.run)
    others = [] if options.root is None else ["--data.root", options.root]
    others += [] if options.score is None else ["--score", options.score]
    settings = settings_argument(options.run, options.trust, without=("logger", "backend"))
    experiment = parse_experiment(f"{PROGRAM} test", [settings, *others])
    console = Console()
    with open_display(console) as display:
        scores = test_run(experiment, options.run, display)
    if missing := set(run.domains) ^ set(experiment.data.domain_names):
        raise InputError(f"Expected the domains of the run in --data.root but these differ: {', '.join(missing)}.")
    rows = {which: {"round": known["round"]} | scores[which].as_metrics() for which, known in run.ends.items()}
    console.print(accuracy_table(f"class-only accuracy (%), score {experiment.score}", rows))
    if experiment.score != run.config.get("score", "max"):  # other numbers are what was asked for
        return 0
    logged = {which: row for which, row in run.ends.items() if not math.isnan(row["test/acc"])}  # a round was judged
    differing = [which for which in logged if any(logged[which][name] != rows[which][name] for name in rows[which])]
    if differing:
        print(f"not what metrics.csv says of: {', '.join(differing)}", file=sys.stderr)
        return 1
    return 0


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", required=True, type=Path, metavar="DIR", help="folder of the run")
    text = "predict a class by the largest of its outputs, or by the sum of its probabilities; default: the run's way"
    parser.add_argument("--score", choices=["max", "sum"], help=text)
    text = "import whatever classes the run folder names, even if you did not make it here (default: false)"
    parser.add_argument("--trust", type=_yes_or_no, default=False, metavar="{true,false}", help=text)


def _yes_or_no(text: str) -> bool:
    """Return what true and false say."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false but got {text!r}")
    return text.lower() == "true"


def _predict(args: Sequence[str]) -> int:
    """write a CSV with class, probability and winning pseudo-domain of images"""
    from jdfl_lightning.storage.folder import kept_weights
    from jdfl_lightning.studies.inference import list_images, load_to_use, predict, write_predictions

    parser = _parser("predict")
    _add_run(parser)
    which = "which of the run's weights to use; default: best, or last if the run keeps no best, as a private one"
    parser.add_argument("--weights", choices=["best", "last"], help=which)
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the CSV goes; standard output if not given")
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGES", help="image files, or folders of them")
    options = parser.parse_args(args)
    model = load_to_use(options.run, options.weights or kept_weights(options.run), options.trust)
    unreadable: list[str] = []
    predictions = predict(model, list_images(options.images), unreadable, options.score)
    if options.output is None:
        write_predictions(predictions, sys.stdout)
    else:
        with _open_output(options.output) as out:
            write_predictions(predictions, out)
    for line in unreadable:
        print(f"{PROGRAM}: {line}", file=sys.stderr)
    return BAD_INPUT if unreadable else 0


def _report(args: Sequence[str]) -> int:
    """compare runs: tables and figures of accuracy, gain, domains and cost, beside the paper's values"""
    from jdfl_lightning.report.write import PAGE, write_report

    parser = _parser("report")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run folders, or folders that contain some")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("report"),
        metavar="DIR",
        help="where the report goes: new, empty, or with an earlier report, which is replaced (default: report)",
    )
    parser.add_argument(
        "--target",
        type=float,
        nargs="+",
        action="extend",
        default=[],
        metavar="ACCURACY",
        help="say the rounds and bytes to reach these accuracies, such as 0.7; default: each algorithm's base",
    )
    parser.add_argument("--wandb", action="store_true", help="put table and figures on Weights & Biases too")
    options = parser.parse_args(args)
    report = write_report(options.runs, options.output, options.target)
    if options.wandb:
        _upload(report)
    print(f"runs compared: {report.num_runs}, left out: {len(report.left_out)}; see {report.folder / PAGE}")
    return 0


def _upload(report: Report, like: WandbRounds | None = None) -> None:
    """Put a report on Weights & Biases."""
    from jdfl_lightning.report.records import COLUMNS
    from jdfl_lightning.ui.loggers import upload_report

    rows = [[record[name] for name in COLUMNS] for record in report.records]
    upload_report(report.folder, COLUMNS, rows, report.pictures, like)


def _open_output(file: Path) -> TextIO:
    try:
        return file.open("w", newline="")
    except OSError as error:
        raise InputError(f"Expected --output to be writable but got {file}: {error}.") from error


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "fit": _fit,
    "discover": _discover,
    "diagnose": _diagnose,
    "suite": _suite,
    "test": _test,
    "predict": _predict,
    "report": _report,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse ``--run=--``, of which argparse makes an empty list."""
        for arg in args or ():
            if arg.startswith("--") and arg.endswith("=--"):
                self.error(f"argument {arg.removesuffix('=--')}: expected one argument")
        return super().parse_known_args(args, namespace)


def _parser(name: str) -> _Parser:
    return _Parser(prog=f"{PROGRAM} {name}", description=COMMANDS[name].__doc__, allow_abbrev=False)


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:{width}}  {command.__doc__}" for name, command in COMMANDS.items())
    return (
        f"usage: {PROGRAM} COMMAND [OPTIONS]\n\n"
        "Joint Domain-Class Federated Learning with PyTorch Lightning.\n\n"
        f"commands:\n{commands}\n\n"
        f"{PROGRAM} COMMAND --help tells the options of a command; {PROGRAM} --version the version."
    )


def _show_note(message: Warning | str, *_: object, **__: object) -> None:
    print(f"note: {plain(str(message), _LONGEST)}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a mistake of the user's ends in one line and exit code 2."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(_help())
        return 0 if args else BAD_INPUT
    if args[0] == "--version":
        print(f"{PROGRAM} {version('jdfl-lightning')}")
        return 0
    try:
        if args[0] not in COMMANDS:
            raise InputError(f"Expected a command, one of {', '.join(COMMANDS)}, but got {args[0]!r}.")
        with warnings.catch_warnings():
            # the screen is the user's: notes are for it, what libraries say to developers is not
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", Note)
            warnings.showwarning = _show_note
            return COMMANDS[args[0]](args[1:])
    except InputError as error:
        print(f"{PROGRAM}: {plain(' '.join(str(error).split()), _LONGEST)}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except OSError as error:  # a disk, a folder or a file that does not do what it should
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt as error:
        terminated = isinstance(error, Terminated)
        print(f"{PROGRAM}: {'terminated' if terminated else 'interrupted'}", file=sys.stderr)
        if isinstance(error, Interrupted) and str(error):
            print(f"go on with: {error}")
        return TERMINATED if terminated else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
