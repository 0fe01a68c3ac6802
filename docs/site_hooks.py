"""Hooks of the documentation site: results, examples and notebooks become part of it.

Pages link to ``../results/...``, which is right in the repository but lies outside the site. The
files are therefore added to the site, and the links shortened. Notebooks are shown as pages, with
the outputs that they were committed with.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
RESULTS = ("*.png", "*.html")
OUTSIDE = ("results", "examples")  # folders beside docs/ that pages link to


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add drawings and pages of results; replace each notebook by the page that shows it."""
    for path in sorted(path for pattern in RESULTS for path in (ROOT / "results").rglob(pattern)):
        files.append(
            File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
        )
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        files.append(
            File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
        )
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        page = File.generated(
            config,
            file.src_uri.removesuffix(".ipynb") + ".md",
            content=notebook_page(Path(str(file.abs_src_path))),
        )
        files.append(page)
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation names notebooks by their files."""
    config.nav = json.loads(json.dumps(config.nav).replace(".ipynb", ".md"))
    return config


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to results and notebooks at what the site has of them."""
    up = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace("](../results/paper)", "](../results/paper/report.html)")
    for folder in OUTSIDE:
        markdown = markdown.replace(f"](../{folder}/", f"]({up}{folder}/")
    markdown = markdown.replace("](../docs/", "](../")
    return re.sub(r"\]\(([\w./-]+)\.ipynb\)", r"](\1.md)", markdown)


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: text as it is, code and its outputs as blocks."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _cell(cell)) + "\n"


def _cell(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return [source]
    return [
        f"```python\n{source}\n```",
        *(text for output in cell["outputs"] if (text := _output(output))),
    ]


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![output](data:image/png;base64,{''.join(data['image/png'].split())})"
    text = "".join(data.get("text/plain", output.get("text", ""))).rstrip()
    return f"```text\n{text}\n```" if text else ""
