"""Run folders -> report.md, report.csv, report.tex, report.html and pictures in one folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_args

import pandas as pd
from matplotlib.figure import Figure

from jdfl_lightning.core.errors import InputError, require, require_choice
from jdfl_lightning.core.files import write_whole
from jdfl_lightning.report import tables
from jdfl_lightning.report.collect import LeftOut, Settings, Value, find_run_folders, read_runs
from jdfl_lightning.report.comparison import COLUMNS, Line, Method, Section, compare
from jdfl_lightning.report.figures import ablation_figure, ablation_groups, accuracy_figure, num_domains_figure
from jdfl_lightning.report.markup import NONE, Block, Chapter, Column, Picture, Table, is_report, render
from jdfl_lightning.report.run import percent
from jdfl_lightning.report.statistics import spread
from jdfl_lightning.report.tables import accuracy_cell, method_columns
from jdfl_lightning.storage.folder import SavedRun, save_figure
from jdfl_lightning.storage.names import UNSEEN_PREFIX, FigureFormat

_DOMAINS = ("domains", "unseen", "data.unseen")
"""Settings that say which domain is left out."""


@dataclass(frozen=True)
class LeaveOneOut:
    """Experiments that differ in the unseen domain alone."""

    title: str
    about: str
    table: Table
    """Accuracy on each domain that was left out, their mean, and the worst."""
    results: list[dict[str, Any]]
    """The lines of ``report.csv``: the mean and the worst of the domains that were left out."""


def leave_one_out(sections: Sequence[Section]) -> Iterator[LeaveOneOut]:
    """Yield the groups of experiments that leave out a domain each, where there are several."""
    groups: dict[Settings, dict[str, Section]] = {}
    for section in sections:
        if len(section.unseen) == 1:
            rest = tuple(pair for pair in section.settings if pair[0] not in _DOMAINS)
            groups.setdefault(rest, {})[section.unseen[0]] = section
    for rest, by_domain in groups.items():
        if len(by_domain) > 1:
            yield _left_out(dict(rest), dict(sorted(by_domain.items())))


def _left_out(settings: dict[str, Value], by_domain: dict[str, Section]) -> LeaveOneOut:
    """Return the results of a group: of each method over seeds, and of its domains' mean over those that all have."""
    data = str(settings.pop("data"))
    words = [f"{name.removeprefix('data.')} {value}" for name, value in settings.items()]
    about = ", ".join([data, *words, "unseen each"])
    methods: dict[Method, Line] = {}
    for section in by_domain.values():
        for line in section.rows:
            methods.setdefault(line.method, line)
    rows: list[list[str]] = []
    results: list[dict[str, Any]] = []
    for method, line in methods.items():
        runs = {name: section.runs[method] for name, section in by_domain.items() if method in section.runs}
        values = {name: own[own["best"]].set_index("seed")[UNSEEN_PREFIX + name] for name, own in runs.items()}
        found = {name: spread(list(of)) for name, of in values.items()}
        shared = sorted(set.intersection(*(set(of.index) for of in values.values())))
        mean = spread([sum(of[seed] for of in values.values()) / len(values) for seed in shared])
        cells = [str(mean.count), *(accuracy_cell(found.get(name)) for name in by_domain), NONE, NONE]
        if len(found) == len(by_domain):
            worst = min(of.mean for of in found.values())
            cells[-2:] = accuracy_cell(mean), percent(worst)
            names = ("algorithm", "supervision", "num_domains", "settings", "seeds")
            shown = dict.fromkeys(COLUMNS) | {name: getattr(line, name) for name in names}
            shown |= {"experiment": about, "protocol": "unseen each", "table": "leave_one_out"}
            shown |= {"count": float(mean.count)}
            results.append(shown | {"quantity": "unseen_mean", "mean": mean.mean, "std": mean.std})
            results.append(shown | {"quantity": "unseen_worst", "mean": worst})
        rows.append(cells)
    columns = method_columns((line.algorithm, line.supervision, line.settings) for line in methods.values())
    heads = ("seeds", *by_domain, "mean", "worst")
    columns += [Column(name, list(cells)) for name, cells in zip(heads, zip(*rows, strict=True), strict=True)]
    picked = next(iter(by_domain.values())).protocol.picked
    caption = f"Accuracy (%) on a domain that no client has, {picked}: a column for each domain that was left out"
    caption += ", mean and standard deviation over seeds; their mean; the lowest."
    return LeaveOneOut(data.rpartition(".")[2], about, Table(caption, columns), results)


TITLE = "Comparison of runs"
PAGE = "report.html"
_TABLES = ("report.md", "report.csv", "report.tex")
_PICTURES = "report-*.png"
_FURTHER = ("report-*.pdf", "report-*.svg")
"""The same pictures in other formats, if they were asked for."""
_INTRODUCTION = (
    "Accuracy is class-only accuracy (%) on the test images of all domains that clients have, in one round of each "
    "run; mean and sample standard deviation over seeds. Every table says how the round was picked: on the test "
    "images, as in the paper, which flatters every row; on validation images; or the last one. Runs of different "
    "protocols are in different experiments, and values of the paper stand only beside runs that follow its protocol. "
    "In bold: the highest mean of an algorithm.",
    "A difference to base is taken seed by seed, between runs that share everything but the joint head. Its 95 % "
    "interval is mean ± t s / √n, with s the standard deviation of the n differences and t the 97.5 % quantile of "
    "Student's distribution with n - 1 degrees of freedom. It is called a gain, or a loss, only if the interval lies "
    "on one side of 0, and is undecided if it contains 0. With one seed nothing is judged, nor where all seeds differ "
    "by exactly the same: accuracy is a count, and a few equal ones are chance. Intervals are not corrected for their "
    "number: where nothing differs, one in twenty lies on one side by chance.",
    "Values of the paper are means of three seeds; a question mark says that a value is no count of test images, or "
    "that its row does not add up, so that it may be a misprint.",
)


@dataclass(frozen=True)
class Report:
    """A written report."""

    folder: Path
    """Where it is."""
    num_runs: int
    """Runs that are compared."""
    left_out: list[LeftOut]
    """Runs that are not, with the reasons."""
    results: pd.DataFrame
    """The content of ``report.csv``."""
    pictures: list[Path]
    """The figures."""
    comparison: list[tuple[str, Table]]
    """The accuracies of each experiment, with its title: what a terminal shows."""

    @property
    def page(self) -> Path:
        """The report as one HTML file."""
        return self.folder / PAGE


def write_report(
    runs: SavedRun | str | Path | Sequence[SavedRun | str | Path],
    output: str | Path = "report",
    targets: Sequence[float] = (),
    formats: Sequence[str] = (),
) -> Report:
    """Compare runs and write the report; nothing is written before all input has been checked.

    Args:
        runs: runs, run folders, or folders that contain some at any depth; one or several.
        output: folder of the report: a new or empty folder, or one with an earlier report, which is replaced.
        targets: accuracies from 0 to 1 to report rounds and bytes for; by default that of each algorithm's baseline.
        formats: formats in which every figure is written besides PNG: pdf, svg.

    Returns:
        The report: its folder, its table of results, and the runs that were left out.
    """
    for target in targets:
        require(0 < target <= 1, "--target", "above 0 and at most 1", target)
    for name in formats:
        require_choice("every one of --formats", name, get_args(FigureFormat))
    output = Path(output)
    _check_output(output)
    given = [runs] if isinstance(runs, (SavedRun, str, Path)) else runs
    folders = [run.folder if isinstance(run, SavedRun) else Path(run) for run in given]
    table, left_out = read_runs(find_run_folders(folders))
    if table.empty:
        first = left_out[0]
        raise InputError(f"Expected a run to report on but all are left out, such as {first.folder}: {first.reason}.")
    sections, count = compare(table, targets), int(table["best"].sum())
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"Expected --output to be writable but got {output}: {error}.") from error
    for stale in [file for pattern in (_PICTURES, *_FURTHER) for file in output.glob(pattern)]:
        stale.unlink()
    aside = f"{len(left_out)} left out, listed with reasons at the end" if left_out else "none was left out"
    summary = f"{'1 run is' if count == 1 else f'{count} runs are'} compared; {aside}."
    parts: list[Chapter] = [("How to read this", [summary, *_INTRODUCTION])]
    groups = list(leave_one_out(sections))
    parts += [(f"Leave one domain out: {group.title}", [f"{group.about}.", group.table]) for group in groups]
    if len(sections) > 1:
        parts.append(("All experiments", [tables.overview_table(sections)]))
    what = "given accuracies" if targets else "the mean best accuracy of the algorithm's base"
    parts += [_part(section, what, output / f"report-{i}", formats) for i, section in enumerate(sections, start=1)]
    everything = "Nothing: every run found is in the tables."
    why = [Column("run folder", [str(entry.folder) for entry in left_out], "text")]
    why.append(Column("why", [entry.reason for entry in left_out], "text"))
    parts.append(("Left out", [Table("Runs that are in no table.", why) if left_out else everything]))
    extra = [pd.DataFrame(group.results, columns=COLUMNS, dtype=object) for group in groups if group.results]
    results = pd.concat([*(section.results[COLUMNS] for section in sections), *extra])
    results = results[results["mean"].notna() | results["target"].isna()]  # a target that no run reached has no mean
    contents = {
        name: tables.as_csv(results) if name == "report.csv" else render(name, title=TITLE, parts=parts)
        for name in (*_TABLES, PAGE)
    }
    for name, content in contents.items():
        write_whole(output / name, content.encode(errors="replace"))  # a folder name may not be valid text
    shown = [(group.title, group.table) for group in groups]
    shown += [(section.title, _accuracies(section)) for section in sections]
    return Report(output, count, left_out, results, sorted(output.glob(_PICTURES)), shown)


def _check_output(output: Path) -> None:
    """Refuse a folder that holds anything but an earlier report."""
    if output.exists() and not output.is_dir():
        raise InputError(f"Expected --output to be a folder but {output} is a file.")
    if output.is_dir() and not is_report(output / PAGE) and not _was_cut_off({file.name for file in output.iterdir()}):
        raise InputError(
            f"Expected --output to be new, empty or the folder of an earlier report but {output} holds other files."
        )


def _was_cut_off(names: set[str]) -> bool:
    """Return whether files are an unfinished report: figures are written first, the page last."""
    tables = names & set(_TABLES)
    pictures = {name for name in names if any(fnmatch(name, pattern) for pattern in (_PICTURES, *_FURTHER))}
    aside = {name for name in names if name == "wandb" or fnmatch(name, ".*.tmp")}
    return names == tables | pictures | aside and (not tables or bool(pictures))


def _accuracies(section: Section) -> Table:
    """Return the main table of an experiment."""
    caption = f"Accuracy (%) {section.protocol.picked}; mean ± standard deviation over seeds."
    return tables.accuracy_table(section.rows, caption, section.lines("main", "accuracy_picked_on_test"))


def _part(section: Section, what: str, pictures: Path, formats: Sequence[Any] = ()) -> Chapter:
    """Return an experiment's tables and pictures; draw the figures to files that start with `pictures`."""

    def draw(figure: Figure, name: str, caption: str, seen: str, rows: Sequence[Line]) -> Picture:
        file = pictures.with_name(f"{pictures.name}-{name}.png")
        save_figure(figure, file, formats)
        means = "; ".join(f"{_name(row)} {percent(row.mean)}" for row in rows)
        return Picture(file, caption, f"{section.title}: {seen}. {means}")

    rows, drawn, sweep = section.rows, section.drawn, section.sweep
    one_m = " Where several M were given, one is drawn: the number of true domains, or else the median."
    one_m = one_m if len(drawn) < len(rows) else ""
    about = f"{section.about}. Protocol: {section.protocol.name}."
    blocks: list[Block] = [about, _accuracies(section)]
    caption = f"Accuracy over the rounds: mean over seeds, band of one standard deviation; the axis is cut.{one_m}"
    blocks.append(draw(accuracy_figure(section), "accuracy", caption, "curves, a panel for each algorithm", drawn))
    blocks.append(tables.domain_table(section))
    if ablation_groups(section):
        caption = f"The joint head with hard targets beside the other supervisions; circles are seeds.{one_m}"
        blocks.append(draw(ablation_figure(section), "ablation", caption, "bars of the ablation", drawn))
    if sweep:
        caption = "Accuracy over a given number of pseudo-domains M; bars are one standard deviation over seeds."
        blocks.append(draw(num_domains_figure(section), "num-domains", caption, "accuracy over M", sweep))
        blocks.append(tables.accuracy_table(sweep, "Accuracy (%) with a given number of pseudo-domains M."))
    costs = tables.cost_table(section, what)
    return section.title, [*blocks, costs] if costs.rows else blocks


def _name(row: Line) -> str:
    given = "" if row.given_domains is None else f"M = {row.given_domains}"
    return " ".join(filter(None, (row.algorithm, row.supervision, given, row.settings)))
