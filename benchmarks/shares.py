"""Discovery and evaluation as shares of a run.

    python benchmarks/shares.py

The digits' example at its defaults but for 10 rounds, with both backends in turns; the time of a run is counted from
the first client's fit to the last score.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from timing import Times, write_section

from jdfl_lightning import DigitsDomains, Experiment, LocalBackend, PoolBackend, fit
from jdfl_lightning.ui.display import Display


class Clock(Display):
    """Notes when discovery is over and when rounds end."""

    def __init__(self) -> None:
        self.discovered = self.ended = 0.0

    def say(self, text: str) -> None:
        """Note the end of discovery."""
        if text.startswith("pseudo-domains"):
            self.discovered = time.perf_counter()


def main() -> None:
    """Run and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    shares: dict[str, Times] = {}
    for _ in range(options.turns):
        for backend in (LocalBackend(), PoolBackend(workers=2, threads=1)):
            name = type(backend).__name__
            clock = Clock()
            with tempfile.TemporaryDirectory() as folder:
                experiment = Experiment(
                    data=DigitsDomains(size=16),
                    rounds=options.rounds,
                    backend=backend,
                    run_dir=str(Path(folder) / "run"),
                )
                begin = time.perf_counter()
                run = fit(experiment, clock)
                total = time.perf_counter() - begin
            own = shares.setdefault(name, Times({"total": [], "discovery": [], "fits": [], "evaluation": []}))
            own["total"].append(total)
            own["discovery"].append(clock.discovered - begin)
            own["fits"].append(sum(row["time/fit"] for row in run.rows))
            own["evaluation"].append(sum(row["time/evaluate"] for row in run.rows))
            print(name, {part: seconds[-1] for part, seconds in own.items()}, flush=True)
    lines = [
        f"The digits at 16 px, 10 clients, 5 a round, {options.rounds} rounds, `random`; medians of "
        f"{options.turns} turns. Evaluations of the pool run beside the next round's fits, so its parts add up to more "
        "than the whole; the start of its workers counts as discovery.",
        "",
        "| backend | a run (s) | start and discovery (s) | rounds' fits (s) | evaluation (s) |",
        "|---|---|---|---|---|",
    ]
    for name, own in shares.items():
        cells = " | ".join(f"{own.median(part):.1f}" for part in own)
        lines.append(f"| {name} | {cells} |")
    write_section("shares", "\n".join(lines))


if __name__ == "__main__":
    main()
