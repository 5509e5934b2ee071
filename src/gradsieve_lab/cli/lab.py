"""`gradsieve lab`: several hosts on this machine, with links of any rate."""

import shutil
from typing import Annotated, Any

import typer

from gradsieve._check import BadInput
from gradsieve_lab.cli.common import clear_errors, refuse
from gradsieve_lab.netlab.network import network
from gradsieve_lab.netlab.programs import run_everywhere
from gradsieve_lab.netlab.rates import DEFAULT_RATE, parse_links
from gradsieve_lab.netlab.rootless import enter_lab
from gradsieve_lab.runs.running import Stop

OWN = ("train", "compare")  # commands with lab options of their own
app = typer.Typer(
    no_args_is_help=True,
    help="""Hosts in network namespaces, joined by slow links (Linux).

    Example: gradsieve lab run --hosts 4 --rate 100mbit -- train mlp""",
)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 4,
    rate: Annotated[
        str, typer.Option(help="Link rate: 100mbit, or up/down, or one per host, separated by commas.")
    ] = DEFAULT_RATE,
) -> None:
    """Run train, compare or any program on hosts.

    A program is started once per host, with the environment of torchrun.

    Example: gradsieve lab run --hosts 2 --rate 20mbit -- python my_ddp.py
    """
    command = context.args
    with clear_errors():
        links = parse_links(rate, hosts)
        if not command:
            raise BadInput(f"lab run must be told what to run: -- {' ..., -- '.join(OWN)} ..., or a program")
        enter_lab()
    if command[0] in OWN:
        whole: Any = context.find_root().command
        whole.main([*command, "--lab-hosts", str(hosts), "--lab-rate", rate], prog_name="gradsieve")
    if shutil.which(command[0]) is None:
        refuse(f"lab run must be told {', '.join(OWN)} or a program, got {command[0]}, which is neither")
    stop = Stop()
    with clear_errors(), stop.watching(), network(links) as made:
        code = run_everywhere(made, command, stop.requested)
    raise typer.Exit(128 + stop.signal if stop.signal else code if code >= 0 else 128 - code)
