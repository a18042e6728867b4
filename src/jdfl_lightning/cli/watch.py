"""The command `watch`."""

from __future__ import annotations

from pathlib import Path


def watch(runs: list[Path], port: int = 0) -> int:
    """serve a page with a run's curves and discovery, on this machine alone, while it trains; Ctrl-C ends it

    Args:
        runs: The run folder.
        port: Port of the page; 0 for any that is free.
    """
    from jdfl_lightning.core.errors import require
    from jdfl_lightning.studies.watch import WatchServer

    require(len(runs) == 1, "RUNS", "one run folder", len(runs))
    with WatchServer(runs[0], port) as server:
        print(f"{server.url} shows {runs[0]}; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
