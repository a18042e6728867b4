"""The command `download`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from jdfl_lightning.ui.starting import starting


def download(data: str, root: Path) -> int:
    """fetch a data set that the package knows into a folder, and check it

    Args:
        data: PACS or OfficeCaltech.
        root: Folder of the images, new or empty; one that has them already is checked. Pass it as --data.root.
    """
    with starting():
        from jdfl_lightning.core.errors import require_choice, subclasses
        from jdfl_lightning.data.folder import KnownDomains
        from jdfl_lightning.ui.display import open_display

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
