"""`agentserve bench outside --tool giraffe`: checks that others wrote, here and on a peer."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from agentserve.bench import report
from agentserve.bench.outside.giraffe import CHECKS, DISTRIBUTION, NAME, PLANS, Subject, check
from agentserve.bench.outside.run import version
from agentserve.bench.outside.tools import ToolFailed
from agentserve.bench.outside.verdicts import Checked, Verdict, shown
from agentserve.cli.local_server import NoServer, local_server
from agentserve.cli.output import fail

OURS = "agentserve"


def checks(
    environment: Path, model: str, name: str, *, url: str | None, peer: str | None, results: Path | None
) -> None:
    """Every plan on our server or, if one is named, on `peer` (`NAME=URL`); ends the command with status 1
    where a check shows a fault of the server. Results of other servers with this model are kept."""
    progress = Console(stderr=True, highlight=False)
    found: list[Verdict] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        try:
            if peer is not None:
                server, _, at = peer.partition("=")
            else:
                server, at = (
                    OURS,
                    url or stack.enter_context(local_server(["--model", model, "--served-model-name", name])),
                )
            subject = Subject(server, at.rstrip("/"), name)
            said = _version(subject.url)
            for plan in PLANS:
                progress.print(f"{NAME}: {server}, {plan.name} ...")
                found += check(plan, subject, environment, folder)
            document = Checked(
                f"outside-{NAME}-{name}",
                {server: shlex.join(["agentserve", *sys.argv[1:]])},
                report.machine(),
                report.versions() | {DISTRIBUTION: version(environment, DISTRIBUTION)},
                name,
                {server: said},
                {plan.name: plan.says for plan in PLANS},
                found,
            )
            if results is not None:
                document = document.beside(results)
                typer.echo(f"written to {report.write(document, results)}")
        except (NoServer, ToolFailed, OSError, ValueError, LookupError) as error:
            fail(str(error))
    _show(document.verdicts, list(document.servers), Console())
    come = shown(found, server)
    if bad := [name for name in CHECKS if come[name] in ("server", "open")]:
        fail(f"not passed, and no answer of the model is why: {', '.join(bad)}")


def _version(url: str) -> str:
    with urllib.request.urlopen(f"{url}/version", timeout=30) as reply:
        return str(json.loads(reply.read())["version"])


def _show(found: Sequence[Verdict], servers: Sequence[str], console: Console) -> None:
    come: Mapping[str, Mapping[str, str]] = {server: shown(found, server) for server in servers}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("check", "plan", *servers):
        table.add_column(column)
    for name in CHECKS:
        for plan in PLANS:
            cells = [_cell(found, server, plan.name, name) for server in servers]
            if any(cells):
                table.add_row(name, plan.name, *cells)
        table.add_row("", "= in all", *(come[server][name] for server in servers))
    console.print(table)
    for verdict in found:
        for fault in verdict.faults:
            console.print(f"{verdict.server}, {verdict.plan}, {verdict.check}: {fault}", markup=False)


def _cell(found: Sequence[Verdict], server: str, plan: str, name: str) -> str:
    for one in found:
        if (one.server, one.plan, one.check) == (server, plan, name):
            return f"{one.status}, {one.right} of {one.scored} right" if one.scored else one.status
    return ""
