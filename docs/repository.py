"""An mkdocs hook: what the site shows of the repository outside docs/, and links from one to the other.

Every notebook is a page, with the outputs that are committed in it: code and printed text become blocks of code,
pictures become files, and tables stay HTML. Nothing is executed: `make notebooks` writes the outputs. A page has a line
``<!-- readme: NAME -->`` where a section of the README goes.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
log = get_plugin_logger("repository")


# --- notebooks ------------------------------------------------------------------------------------------------------

_PICTURE = re.compile(r'<img[^>]*src="data:image/png;base64,([^"]+)"[^>]*>')
_STYLE = re.compile(r'<style.*?</style>| class="dataframe"| border="1"| style="text-align: right;"', re.DOTALL)
"""What pandas writes for Jupyter; a table without it looks like the others of the site."""


class NotebookPage:
    """A notebook as Markdown.

    Args:
        file: the notebook.
    """

    def __init__(self, file: Path) -> None:
        self.name = file.stem
        self.pictures: dict[str, bytes] = {}
        """The pictures among its outputs, by the names that the page has for them."""
        first, *others = json.loads(file.read_text())["cells"]
        source = f"*This is the notebook `notebooks/{file.name}` of the repository, with its outputs.*"
        parts = [_text(first["source"]), source, *(part for cell in others for part in self._cell(cell))]
        self.text = "\n\n".join(parts)

    def _cell(self, cell: dict[str, Any]) -> Iterator[str]:
        source = _text(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            return
        yield f"```python\n{source}\n```"
        for output in cell["outputs"]:
            yield from self._output(output.get("data", {"text/plain": output.get("text", "")}))

    def _output(self, data: dict[str, Any]) -> Iterator[str]:
        """Yield an output in the form that shows the most."""
        if "image/png" in data:
            yield self._picture(_text(data["image/png"]))
        elif "text/html" in data:
            pieces = _PICTURE.split(_STYLE.sub("", _text(data["text/html"])))  # pictures are at odd places
            for place, piece in enumerate(pieces):
                if place % 2:
                    yield self._picture(piece)
                elif piece.strip():
                    yield f'<div class="output">\n{piece.strip()}\n</div>'
        else:
            yield f"``` {{ .text .output }}\n{_text(data['text/plain']).rstrip()}\n```"

    def _picture(self, encoded: str) -> str:
        name = f"{self.name}-{len(self.pictures) + 1}.png"
        self.pictures[name] = base64.b64decode(encoded)
        return f"![output of the code above]({name})"


def _text(lines: str | list[str]) -> str:
    return "".join(lines)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the notebooks and their pictures."""
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = NotebookPage(file)
        files.append(File.generated(config, f"notebooks/{page.name}.md", content=page.text))
        for name, picture in page.pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


# --- the README, and links ------------------------------------------------------------------------------------------


def readme(section: str) -> str:
    """Return a section of the README with its heading, as a page in docs/ would have it; "opening" is its beginning."""
    opening, *others = re.split(r"^(?=## )", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    sections = {"opening": opening.partition("\n")[2]} | {text.partition("\n")[0][3:]: text for text in others}
    if section not in sections:
        log.warning(f"README.md has no section {section!r}.")
    return re.sub(r"\]\((?!docs/|[a-z]+:|#)", "](../", sections.get(section, "")).replace("](docs/", "](")


def _shown_at(path: Path) -> str | None:
    """Return the place in the site of a file of the repository; None if it is no part of the site."""
    if path.suffix == ".ipynb" and path.parent == ROOT / "notebooks":
        return f"notebooks/{path.stem}.md"
    return path.relative_to(ROOT / "docs").as_posix() if path.is_relative_to(ROOT / "docs") else None


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put in the README's sections, and mend the links that leave docs/, which are right in the repository alone."""
    uri = page.file.src_uri
    folder = (ROOT if uri.startswith("notebooks/") else ROOT / "docs") / Path(uri).parent

    def mend(link: re.Match[str]) -> str:
        words, (target, hash_sign, anchor) = link[1], link[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return link[0]
        path = (folder / target).resolve()
        shown = _shown_at(path)
        if shown is not None:  # mkdocs warns if it is not there
            return f"[{words}]({os.path.relpath(shown, Path(uri).parent)}{hash_sign}{anchor})"
        if not path.exists():
            log.warning(f"{uri} links to {target}, which does not exist.")
        return words  # a file that is no part of the site

    markdown = re.sub(r"<!-- readme: (.+?) -->", lambda place: readme(place[1]), markdown)
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)  # code, at odd places, stays as it is
    return "".join(part if place % 2 else LINK.sub(mend, part) for place, part in enumerate(parts))
