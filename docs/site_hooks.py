"""What mkdocs does beside its configuration: pages that are files of the repository, with their links corrected."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
INCLUDED = {"contributing.md": "CONTRIBUTING.md", "changes.md": "CHANGELOG.md"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's own text, or that of the file it stands for."""
    if page.file.src_uri not in INCLUDED:
        return markdown
    text = (ROOT / INCLUDED[page.file.src_uri]).read_text()
    for target, name in INCLUDED.items():
        text = text.replace(f"]({name}", f"]({target}")
    return text.replace("](docs/", "](")
