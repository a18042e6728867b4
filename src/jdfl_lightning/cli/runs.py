"""Commands that look at run folders, compare them and use their models."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from jdfl_lightning.cli.program import BAD_INPUT, FAILED, PROGRAM, starting
from jdfl_lightning.core.errors import InputError
from jdfl_lightning.core.files import as_json
from jdfl_lightning.core.lists import Fractions, Names
from jdfl_lightning.ui.display import open_display
from jdfl_lightning.ui.tables import show_tables, table_width

if TYPE_CHECKING:
    from jdfl_lightning.report.write import Report
    from jdfl_lightning.ui.loggers import WandbRounds


def list_all(runs: list[Path] = [], json: bool = False) -> int:  # noqa: B006 - nothing changes it
    """list runs with their state, settings, accuracy and size

    Args:
        runs: Run folders, or folders that contain some; runs/ if not given.
        json: Print JSON, a list of objects.
    """
    from jdfl_lightning.report.collect import find_run_folders
    from jdfl_lightning.report.listing import list_table, summarize
    from jdfl_lightning.storage.names import RUNS

    folders = find_run_folders(runs or [Path(RUNS)]) if runs or Path(RUNS).is_dir() else []
    found = sorted(map(summarize, folders), key=lambda run: run.changed)  # those written last at the end
    if json:
        print(as_json([asdict(run) for run in found]))
    elif not found:
        print("no runs")
    else:
        console, table = Console(), list_table(found)
        if table_width(table) > console.width and len(found) > 1:  # the folders once, not in each part of the table
            table = list_table(found, numbered=True)
            for number, run in enumerate(found, 1):
                print(f"{number}: {run.folder}")
        show_tables(console, [table])
        for run in found:
            if run.problem:
                print(f"{run.folder}: {run.problem}")
    return 0


def show(runs: list[Path], json: bool = False) -> int:
    """show runs: accuracies, discovery and all settings

    Args:
        runs: Run folders.
        json: Print JSON, a list of objects.
    """
    from jdfl_lightning.report.listing import list_table, run_record, settings_table, summarize
    from jdfl_lightning.report.run import run_table
    from jdfl_lightning.storage.folder import read_run

    found = [read_run(folder) for folder in runs]
    if json:
        print(as_json([run_record(run) for run in found]))
        return 0
    for run in found:
        summary = summarize(run.folder)
        show_tables(Console(), [list_table([summary]), run_table(run), settings_table(run.config, "settings")])
        if run.stop is not None:
            print(f"stopped after round {run.stop.round}: {run.stop}")
    return 0


def compare(runs: list[Path], json: bool = False) -> int:
    """compare runs side by side: the settings in which they differ, and their accuracies; writes nothing

    Args:
        runs: Run folders, or folders that contain some.
        json: Print JSON, an object with runs and settings.
    """
    from jdfl_lightning.report.collect import find_run_folders
    from jdfl_lightning.report.listing import compare_table, differences, summarize
    from jdfl_lightning.storage.folder import read_run

    found = [read_run(folder) for folder in find_run_folders(runs)]
    if json:
        print(as_json({"runs": [asdict(summarize(run.folder)) for run in found], "settings": differences(found)}))
    else:
        show_tables(Console(), [compare_table(found)])
    return 0


def rm(runs: list[Path], yes: bool = False) -> int:
    """delete run folders, after asking

    Args:
        runs: Run folders themselves; a folder that is not a run, is in use or holds other files is refused.
        yes: Delete without asking.
    """
    from rich.filesize import decimal

    from jdfl_lightning.report.listing import summarize
    from jdfl_lightning.storage.folder import check_removable, remove_runs

    for folder in runs:
        check_removable(folder)
    runs = list({folder.resolve(): folder for folder in runs}.values())  # one may be given in two ways
    if not yes:
        if not sys.stdin.isatty():
            raise InputError("Expected --yes true, as there is no terminal to ask at. Nothing was deleted.")
        size = decimal(sum(summarize(folder).bytes for folder in runs))
        print(*runs, sep="\n")
        answer = input(f"delete {len(runs)} run{'s' * (len(runs) > 1)} ({size})? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return 0
    remove_runs(runs)
    print(f"deleted: {', '.join(map(str, runs))}")
    return 0


def report(
    runs: list[Path],
    output: Path = Path("report"),
    target: Fractions = Fractions(""),
    formats: Names | None = None,
    wandb: bool = False,
) -> int:
    """compare runs: tables and figures of accuracy, gain, domains and cost, beside the paper's values

    Args:
        runs: Run folders, or folders that contain some.
        output: Where the report goes: new, empty, or with an earlier report, which is replaced.
        target: Say the rounds and bytes to reach these accuracies, such as 0.7,0.8; none for each algorithm's base.
        formats: Formats of the figures besides PNG, such as pdf,svg; null for none.
        wandb: Put table and figures on Weights & Biases too.
    """
    with starting():
        from jdfl_lightning.report.write import write_report

    written = write_report(runs, output, target, formats or ())
    if wandb:
        upload(written)
    tell(written)
    return 0


def tell(report: Report) -> None:
    """Show a report's comparison, and say where the report is."""
    from jdfl_lightning.report.tables import on_screen

    show_tables(Console(), [on_screen(title, table) for title, table in report.comparison])
    print(f"runs compared: {report.num_runs}, left out: {len(report.left_out)}; see {report.page}")


def upload(report: Report, like: WandbRounds | None = None) -> None:
    """Put a report's table and pictures on Weights & Biases, as a run named ``report``.

    Args:
        report: the report; W&B's own files go to its folder.
        like: a logger whose project, entity and group it shares.
    """
    from jdfl_lightning.ui.loggers import WandbRounds, log_picture

    like = like or WandbRounds()
    logger = WandbRounds(like.project, like.entity, "report", like.group, like.tags, like.offline)
    try:
        logger.start(report.folder, "report")
    except Exception as error:  # wandb's own, pydantic's, or the operating system's
        raise InputError(f"Expected --wandb to start but Weights & Biases refused: {error}") from error
    logger.log_table("report", list(report.results), report.results.values.tolist())
    for picture in report.pictures:
        log_picture(logger, picture.stem, picture)
    logger.finalize("success")


def evaluate(
    run: Path,
    score: Literal["max", "sum"] | None = None,
    data__root: str | None = None,
    trust: bool = False,
    json: bool = False,
) -> int:
    """evaluate the saved weights of a run again, and write evaluation.json and the confusion matrix

    Args:
        run: Folder of the run.
        score: Predict a class by its largest output, or by the sum of its probabilities; null for the run's way.
        data__root: Folder of the images, if they have moved since the run.
        trust: Import whatever classes the run folder names, even if you did not make it here.
        json: Print JSON instead of tables: the accuracies of all saved weights, and evaluation.json.
    """
    with starting():
        from jdfl_lightning.report.details import details_tables
        from jdfl_lightning.report.run import accuracy_table
        from jdfl_lightning.server.closing import examine_model, write_details
        from jdfl_lightning.storage.details import read_details
        from jdfl_lightning.storage.folder import read_run
        from jdfl_lightning.storage.weights import kept_weights, load_model
        from jdfl_lightning.studies import inference

    console = Console(stderr=json)
    with open_display(console) as display:
        workspace, tested = inference.tested(run, score, data__root, trust, display)
        kept = kept_weights(run)
        details = examine_model(workspace, kept, load_model(run, kept))
    rows = {row.pop("weights"): row for row in tested}
    found = read_run(run)
    usual = found.config.get("score", "max").replace("own", "max")  # own: of clients' own models alone
    as_usual = score in (None, usual)  # else other numbers are what was asked for
    logged = {which: row for which, row in found.ends.items() if not math.isnan(row["test/acc"])}  # it was evaluated
    differing = [which for which in logged if any(logged[which][name] != rows[which][name] for name in rows[which])]
    if json:
        same = not differing if as_usual else None
        print(as_json({"run": run, "weights": rows, "same_as_metrics": same, "evaluation": details}))
    else:
        title = f"class-only accuracy (%), score {score or usual}"
        show_tables(console, [accuracy_table(title, rows), *details_tables(details)])
    if as_usual and differing:
        print(f"not what metrics.csv says of: {', '.join(differing)}", file=sys.stderr)
        return FAILED
    if as_usual:
        personal = (read_details(run) or {}).get("personal")  # clients' own models are evaluated by `fit` alone
        write_details(workspace, run, details | ({} if personal is None else {"personal": personal}))
    return 0


def predict(
    run: Path,
    images: list[Path],
    weights: Literal["best", "last"] | None = None,
    score: Literal["max", "sum"] | None = None,
    output: Path | None = None,
    trust: bool = False,
) -> int:
    """write a CSV with class, probability and winning pseudo-domain of images

    Args:
        run: Folder of the run, or of a model that export wrote for a hub.
        images: Image files, or folders of them.
        weights: Which of the run's weights to use; null for best, or last if the run keeps no best, as a private one.
        score: Predict a class by its largest output, or by the sum of its probabilities; null for the run's way.
        output: Where the CSV goes; standard output if not given.
        trust: Import whatever classes the run folder names, even if you did not make it here.
    """
    with starting():
        from jdfl_lightning.studies.inference import list_images, predictions, write_predictions
        from jdfl_lightning.studies.model import load_folder

        model, files = load_folder(run, weights, trust), list_images(images)
    unreadable: list[str] = []
    found = predictions(model, files, unreadable, score)
    if output is None:
        write_predictions(found, sys.stdout)
    else:
        try:
            out = output.open("w", newline="")
        except OSError as error:
            raise InputError(f"Expected --output to be writable but got {output}: {error}.") from error
        with out:
            write_predictions(found, out)
    for line in unreadable:
        print(f"{PROGRAM}: {line}", file=sys.stderr)
    return BAD_INPUT if unreadable else 0


def export(
    run: Path,
    format: Literal["torch", "onnx", "lightning", "hub"] = "torch",
    output: Path | None = None,
    weights: Literal["best", "last"] | None = None,
    trust: bool = False,
) -> int:
    """write the network of a run for use elsewhere, with its preprocessing and class names

    Args:
        run: Folder of the run.
        format: torch, a program of torch.export; onnx; lightning, a checkpoint; hub, a folder with a model card.
        output: The new file, or folder for hub; null for model.pt2, model.onnx, model.ckpt or model.
        weights: Which of the run's weights to use; null for best, or last if the run keeps no best, as a private one.
        trust: Import whatever classes the run folder names, even if you did not make it here.
    """
    with starting(doing="exporting"):  # to ONNX or torch takes as long as a short training
        from jdfl_lightning.studies.export import export as write

        written = write(run, format, output, weights, trust)
    print(written)
    return 0
