"""Run folders -> report.md, report.csv, report.tex, report.html and pictures in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from matplotlib.figure import Figure

from jdfl_lightning.core.errors import InputError, require
from jdfl_lightning.core.files import write_whole
from jdfl_lightning.report.collect import LeftOut, find_run_folders, read_finished
from jdfl_lightning.report.comparison import Row, Section, compare
from jdfl_lightning.report.document import (
    INTRODUCTION,
    Block,
    Part,
    Picture,
    accuracy_table,
    cost_table,
    domain_table,
    left_out_part,
    overview_table,
    percent,
)
from jdfl_lightning.report.figures import DPI, ablation_figure, ablation_groups, accuracy_figure, num_domains_figure
from jdfl_lightning.report.markup import as_latex, as_markdown
from jdfl_lightning.report.page import as_html, is_report
from jdfl_lightning.report.records import Record, as_csv, records

TITLE = "Comparison of runs"
PAGE = "report.html"
_TABLES = ("report.md", "report.csv", "report.tex")
_PICTURES = "report-*.png"


@dataclass(frozen=True)
class Report:
    """What was written."""

    folder: Path
    num_runs: int
    left_out: list[LeftOut]
    records: list[Record]
    pictures: list[Path]


def write_report(runs: Sequence[Path], output: Path, targets: Sequence[float] = ()) -> Report:
    """Compare runs and write the report; nothing is written before all input has been looked at.

    Args:
        runs: run folders, or folders that contain some at any depth.
        output: where the report goes: a new or empty folder, or one with an earlier report, which is replaced.
        targets: accuracies, as shares, to say the rounds and bytes for; by default that of each algorithm's baseline.
    """
    for target in targets:
        require(0 < target <= 1, "--target", "above 0 and at most 1", target)
    _check_output(output)
    finished, left_out = read_finished(find_run_folders(runs))
    if not finished:
        first = left_out[0]
        raise InputError(f"Expected a run to report on but all are left out, such as {first.folder}: {first.reason}.")
    sections = compare(finished)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"Expected --output to be writable but got {output}: {error}.") from error
    for stale in output.glob(_PICTURES):
        stale.unlink()
    parts = [Part("How to read this", [_summary(len(finished), left_out), *INTRODUCTION])]
    if len(sections) > 1:
        parts.append(Part("All experiments", [overview_table(sections)]))
    for number, section in enumerate(sections, start=1):
        parts.append(_part(section, targets, output, number))
    parts.append(left_out_part(left_out))
    found = records(sections, targets)
    contents = (as_markdown(TITLE, parts), as_csv(found), as_latex(TITLE, parts), as_html(TITLE, parts))
    for name, content in zip((*_TABLES, PAGE), contents, strict=True):
        write_whole(output / name, content.encode(errors="replace"))  # a folder's name may be no text
    return Report(output, len(finished), left_out, found, sorted(output.glob(_PICTURES)))


def _check_output(output: Path) -> None:
    """Refuse a folder that holds anything but an earlier report."""
    if output.exists() and not output.is_dir():
        raise InputError(f"Expected --output to be a folder but {output} is a file.")
    if output.is_dir() and not is_report(output / PAGE) and not _was_cut_off({file.name for file in output.iterdir()}):
        raise InputError(
            f"Expected --output to be new, empty or the folder of an earlier report but {output} holds other files."
        )


def _was_cut_off(names: set[str]) -> bool:
    """Return whether files are the beginning of a report: pictures come first, the page comes last."""
    tables = names & set(_TABLES)
    pictures = {name for name in names if fnmatch(name, _PICTURES)}
    aside = {name for name in names if name == "wandb" or fnmatch(name, ".*.tmp")}
    return names == tables | pictures | aside and (not tables or bool(pictures))


def _summary(count: int, left_out: Sequence[LeftOut]) -> str:
    runs = "1 run is" if count == 1 else f"{count} runs are"
    aside = f"{len(left_out)} left out, listed with reasons at the end" if left_out else "none was left out"
    return f"{runs} compared; {aside}."


def _part(section: Section, targets: Sequence[float], output: Path, number: int) -> Part:
    """Return an experiment's tables and pictures; the pictures are drawn."""
    blocks: list[Block] = [f"{section.about}."]
    blocks.append(accuracy_table(section.rows, "Accuracy (%) in the best round, mean ± standard deviation over seeds."))
    one_m = _one_m(section)
    file = _save(accuracy_figure(section), output / f"report-{number}-accuracy.png")
    caption = "Accuracy over the rounds: mean over seeds, band of one standard deviation; the axis is cut."
    blocks.append(
        Picture(file, caption + one_m, f"{section.title}: curves, a panel for each algorithm. {_means(section)}")
    )
    blocks.append(domain_table(section))
    if ablation_groups(section):
        file = _save(ablation_figure(section), output / f"report-{number}-ablation.png")
        caption = "The joint head with hard targets beside the other supervisions; circles are seeds."
        blocks.append(Picture(file, caption + one_m, f"{section.title}: bars of the ablation. {_means(section)}"))
    if section.sweep:
        file = _save(num_domains_figure(section), output / f"report-{number}-num-domains.png")
        caption = "Accuracy over a given number of pseudo-domains M; bars are one standard deviation over seeds."
        means = "; ".join(f"{_name(row)} {percent(row.accuracy.mean)}" for row in section.sweep)
        blocks.append(Picture(file, caption, f"{section.title}: accuracy over M. {means}"))
        blocks.append(accuracy_table(section.sweep, "Accuracy (%) with a given number of pseudo-domains M."))
    costs = cost_table(section, targets)
    if costs.rows:
        blocks.append(costs)
    return Part(section.title, blocks)


def _save(figure: Figure, file: Path) -> Path:
    figure.savefig(file, dpi=DPI)
    return file


def _one_m(section: Section) -> str:
    """Return a sentence on the rows that are not drawn, if there are such."""
    if len(section.drawn) == len(section.rows):
        return ""
    return " Where several M were given, one is drawn: the number of true domains, or else the median."


def _name(row: Row) -> str:
    given = "" if row.given_domains is None else f"M = {row.given_domains}"
    return " ".join(filter(None, (row.algorithm, row.supervision, given, row.settings)))


def _means(section: Section) -> str:
    return "; ".join(f"{_name(row)} {percent(row.accuracy.mean)}" for row in section.drawn)
