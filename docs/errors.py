"""The lists of errors in docs/troubleshooting.md, made from the source: `python docs/errors.py`.

A list stands between `<!-- errors: FOLDER ... -->` and `<!-- end -->`: the messages raised by the modules in these
folders, with … where a value stands.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
_LIST = re.compile(r"(<!-- errors: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
_SILENT = ("typer.Exit", "AssertionError", "NotImplementedError", "SystemExit")


def raised() -> Iterator[tuple[str, str, str]]:
    """Module, exception and message of every `raise` with words of its own."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        module = path.relative_to(ROOT / "src").as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                kind, message = ast.unparse(node.exc.func), _text(node.exc.args[0])
                if kind not in _SILENT and re.search(r"[a-z]{2}", message):
                    yield module, kind, re.sub(r"…+", "…", message.split("\n")[0])


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(parts):
            return "".join(_text(part) for part in parts)
        case ast.BinOp(left, ast.Add(), right):
            return _text(left) + _text(right)
        case _:
            return "…"


def filled() -> str:
    """The page with its lists as the source has them."""
    found = list(raised())

    def fill(match: re.Match[str]) -> str:
        folders = tuple(match[2].split())
        lines = dict.fromkeys(
            f"- `{kind}`: {_escaped(text)}" for module, kind, text in found if module.startswith(folders)
        )
        return match[1] + "\n" + "\n".join(lines) + "\n\n" + match[3]

    return _LIST.sub(fill, PAGE.read_text())


def _escaped(text: str) -> str:
    return re.sub(r"([\[\]*_<>`|])", r"\\\1", text)


def covered(module: str) -> bool:
    """Whether some list of the page is about this module."""
    return any(module.startswith(tuple(match[2].split())) for match in _LIST.finditer(PAGE.read_text()))


if __name__ == "__main__":
    PAGE.write_text(filled())
