"""What the benchmarks share: taking turns, and writing a section of a page in docs/."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


class Times(dict[str, list[float]]):
    """Seconds of each case, turn by turn."""

    def median(self, case: str) -> float:
        """Return the median of a case's seconds."""
        return statistics.median(self[case])

    def ratio(self, case: str, base: str) -> str:
        """Return how long a case takes in units of another.

        First the ratio of the least times, which others on the machine disturb least; then the median of the turns'
        ratios, with the least and the most.
        """
        ratios = [a / b for a, b in zip(self[case], self[base], strict=True)]
        best = min(self[case]) / min(self[base])
        return f"{best:.3f}; {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def in_turns(
    cases: Mapping[str, Callable[[], object]], turns: int, clock: Callable[[], float] = time.perf_counter
) -> Times:
    """Time every case in every turn (A B C A B C ...), after a turn that does not count.

    Args:
        cases: what is timed.
        turns: how often.
        clock: `time.process_time` for seconds of computing, where other work on the machine would disturb the clock.
    """
    times = Times({name: [] for name in cases})
    for turn in range(turns + 1):
        for name, case in cases.items():
            start = clock()
            case()
            seconds = clock() - start
            if turn:
                times[name].append(seconds)
            print(f"turn {turn}  {name}: {seconds:.3f} s", flush=True)
    return times


def write_section(name: str, text: str, file: str = "performance.md") -> None:
    """Print a section, and put it into its place in a page of docs/."""
    print(f"\n{text}")
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    page = (DOCS / file).read_text()
    if begin not in page:
        raise SystemExit(f"{DOCS / file} has no place for {name}")
    place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", flags=re.DOTALL)
    (DOCS / file).write_text(place.sub(lambda _: f"{begin}\n{text.strip()}\n{end}", page))
