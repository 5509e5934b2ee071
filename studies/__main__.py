"""`python -m studies`: regenerate the papers' claims."""

import typer

from studies.command import reproduce

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(reproduce)

if __name__ == "__main__":
    app(prog_name="python -m studies")
