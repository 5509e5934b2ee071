"""What mkdocs does beside its configuration: pages that are files of the repository, with their links corrected;
search without another server's script."""

from pathlib import Path
from typing import Any

from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parent.parent
WORKER = "assets/folder-search.js"  # without it, search is hidden in pages that are opened from a folder
THEIRS = "https://unpkg.com/iframe-worker/shim"
INCLUDED = {"contributing.md": "CONTRIBUTING.md", "changes.md": "CHANGELOG.md"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's own text, or that of the file it stands for."""
    if page.file.src_uri not in INCLUDED:
        return markdown
    text = (ROOT / INCLUDED[page.file.src_uri]).read_text()
    for target, name in INCLUDED.items():
        text = text.replace(f"]({name}", f"]({target}")
    return text.replace("](docs/", "](")


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The theme's offline search, with a script of the site's own."""
    if THEIRS not in output:
        raise RuntimeError(f"the theme no longer loads {THEIRS}: see whether search still works offline")
    return output.replace(THEIRS, get_relative_url(WORKER, page.url))


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """The same for the page of a missing page."""
    return output_content.replace(THEIRS, WORKER)
