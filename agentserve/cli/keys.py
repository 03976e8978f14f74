"""`agentserve keys`: who may use the servers of a data directory, and as which tenant."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from agentserve.cli.output import fail
from agentserve.server.tenants.keyfile import FOLDER, MOST_GRACE, KeyFile, KeysError
from agentserve.server.tenants.keys import KeyRecord
from agentserve.tenant_names import is_tenant

DataDir = Annotated[Path, typer.Option(help="As the server's --data-dir.")]

keys = typer.Typer(help="API keys: make, list, rotate and revoke them.", no_args_is_help=True)


@keys.command("create")
def create(
    data_dir: DataDir,
    tenant: Annotated[str | None, typer.Option(help="Whose key it is.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="For admin routes, and for no tenant.")] = False,
) -> None:
    """Make a key and show it, this once. A running server takes it within a few seconds."""
    if admin == (tenant is not None):
        fail("say --tenant NAME or --admin, one of the two")
    with _told():
        record, key = _file(data_dir).create(tenant, time.time())
    typer.echo(key)
    typer.echo(f"id {record.id}, {_whose(record)}; the key is shown this once and kept nowhere", err=True)


@keys.command("list")
def list_keys(
    data_dir: DataDir,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
) -> None:
    """List keys by their ids: whose they are, since when, and whether they still hold."""
    with _told():
        records = _file(data_dir).records()
    for record in records:
        if tenant is None or record.tenant == tenant:
            ended = "holds" if record.revoked is None else f"revoked {_day(record.revoked)}"
            if record.revoked is not None and record.holds(time.time()):
                ended = f"holds until {_day(record.revoked)}"
            typer.echo(f"{record.id}  {_whose(record):<24} made {_day(record.created)}  {ended}")


@keys.command("revoke")
def revoke(
    data_dir: DataDir,
    key: Annotated[str | None, typer.Argument(help="Its id, as `list` shows it.", metavar="ID")] = None,
    tenant: Annotated[str | None, typer.Option(help="All keys of this tenant.")] = None,
) -> None:
    """Let a key in no longer, or all of a tenant's. What runs for it ends."""
    if (key is None) == (tenant is None):
        fail("say the key's id or --tenant NAME, one of the two")
    if tenant is not None and not is_tenant(tenant):
        fail(f"{tenant[:80]!r} is no tenant's name")

    def wanted(record: KeyRecord) -> bool:
        return record.id == key if key is not None else record.tenant == tenant

    with _told():
        gone = _file(data_dir).revoke(wanted, time.time())
    if not gone:
        fail("no such key that holds")
    for record in gone:
        typer.echo(f"{record.id}, {_whose(record)}: revoked")


@keys.command("rotate")
def rotate(
    data_dir: DataDir,
    key: Annotated[str, typer.Argument(help="Its id, as `list` shows it.", metavar="ID")],
    grace_seconds: Annotated[float, typer.Option(help="That the old key is let in yet.")] = 0.0,
) -> None:
    """Make a key in the place of another and show it, this once."""
    if not 0 <= grace_seconds <= MOST_GRACE:
        fail(f"--grace-seconds must be 0 to {MOST_GRACE:g}")
    with _told():
        made = _file(data_dir).rotate(key, time.time(), grace_seconds)
    if made is None:
        fail("no such key that holds")
    record, text = made
    typer.echo(text)
    typer.echo(f"id {record.id}, {_whose(record)}, in the place of {key}", err=True)


def _file(data_dir: Path) -> KeyFile:
    return KeyFile(data_dir / FOLDER)


def _whose(record: KeyRecord) -> str:
    return "an admin's" if record.tenant is None else f"of {record.tenant}"


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except KeysError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or 'the keys'}: {error.strerror or error}")
