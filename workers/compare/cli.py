"""`ps-compare`: trains one job with several topologies, checks that they agree and compares their speed.

Only typer is imported here and in the commands, so that `--help` is fast.
"""

from __future__ import annotations

from typing import Annotated

import typer

from hubring.ps.config import terminal
from hubring.workers.compare.commands.list import show_list
from hubring.workers.compare.commands.report import report
from hubring.workers.compare.commands.run import run
from hubring.workers.compare.commands.timeline import timeline
from hubring.workers.compare.cost import cli as cost

app = typer.Typer(
    help="Compare topologies on one job: check that they agree, then measure their speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def program(version: Annotated[bool, terminal.version_option()] = False) -> None:
    """Takes the options in front of a command."""


app.command()(run)
app.command()(report)
app.command("list")(show_list)
app.command()(timeline)
app.command()(cost.calibrate)
app.command()(cost.predict)


def main() -> None:
    """Run `ps-compare`."""
    terminal.unwind_on_sigterm()
    terminal.run(app, "ps-compare")


if __name__ == "__main__":
    main()
