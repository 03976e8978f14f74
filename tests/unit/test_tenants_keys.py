"""Keys at rest and keys in hand: what is kept of them, whom they let in, and when no longer."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentserve.cli.main import app
from agentserve.config import load
from agentserve.server.tenants.keyfile import KeyFile, KeysError
from agentserve.server.tenants.keyring import Keyring
from agentserve.server.tenants.keys import ANYBODY, Caller, KeyTable, key_id, new_key
from agentserve.values import ConfigError


def test_a_key_is_found_by_its_id_and_nothing_else_lets_in(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "tenants")
    record, key = file.create("acme", 10.0)
    _, other = file.create("other", 11.0)
    _, admin = file.create(None, 12.0)
    table = file.table()
    assert table.caller(key) == Caller("acme", admin=False, key=record.id)
    assert table.caller(admin) == Caller(None, admin=True, key=key_id(admin))
    swapped = key[: -len(other.rpartition("_")[2])] + other.rpartition("_")[2]
    wrong = (
        key[:-1] + ("0" if key[-1] != "0" else "1"),
        swapped,
        key.upper(),
        key + "0",
        key[:-1],
        "",
        "ask_",
    )
    for guess in (*wrong, "ask_" + "0" * 12 + "_" + "0" * 64, "\ud800", record.id):
        assert table.caller(guess) is None


def test_every_key_is_256_bits_of_its_own() -> None:
    made = {new_key() for _ in range(50)}
    assert len({name for name, _ in made}) == len({key for _, key in made}) == 50
    assert all(len(key.rpartition("_")[2]) == 64 and key_id(key) == name for name, key in made)


def test_at_rest_there_is_no_key_and_files_are_their_owner_s(tmp_path: Path) -> None:
    folder = tmp_path / "tenants"
    _, key = KeyFile(folder).create("acme", 1.0)
    secret = key.rpartition("_")[2].encode()
    for path in folder.iterdir():
        assert secret not in path.read_bytes()
        assert bytes.fromhex(secret.decode()) not in path.read_bytes()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # The digests alone check no guess: without the pepper the file is of no use, here or elsewhere.
    (folder / "pepper").unlink()
    with pytest.raises(KeysError, match="pepper"):
        KeyFile(folder).table()


def test_keys_made_at_once_are_all_there(tmp_path: Path) -> None:
    def make(i: int) -> None:
        KeyFile(tmp_path / "t").create(f"tenant-{i}", float(i))

    threads = [threading.Thread(target=make, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {record.tenant for record in KeyFile(tmp_path / "t").records()} == {
        f"tenant-{i}" for i in range(8)
    }


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[", b'{"version":2,"keys":[]}', b"\xff", b'{"keys":[{"id":1}]}']
)
def test_a_file_that_is_no_key_file_stops_the_start_and_changes_nothing_later(
    tmp_path: Path, content: bytes
) -> None:
    file = KeyFile(tmp_path)
    _, key = file.create("acme", 1.0)
    ring = Keyring(file=file)
    (tmp_path / "keys.json").write_bytes(content)
    ring.look()
    assert ring.caller(key) is not None
    with pytest.raises(KeysError):
        Keyring(file=KeyFile(tmp_path))


def test_a_running_server_takes_new_keys_and_lets_revoked_ones_in_no_longer(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    ring = Keyring(file=file)
    assert ring.caller("") is ANYBODY
    record, key = file.create("acme", 1.0)
    assert ring.caller("") is ANYBODY  # it has not looked yet
    ring.look()
    assert ring.closed
    assert ring.caller("") is None
    assert ring.caller(key) == Caller("acme", admin=False, key=record.id)
    assert [gone.id for gone in file.revoke(lambda one: one.id == record.id, 2.0)] == [record.id]
    assert file.revoke(lambda one: one.id == record.id, 3.0) == []
    ring.look()
    assert ring.caller(key) is None
    (tmp_path / "keys.json").unlink()  # who loses the file does not open the server
    ring.look()
    assert ring.closed
    assert ring.caller("") is None


def test_keys_given_at_the_start(tmp_path: Path) -> None:
    alone = Keyring(["one", "two"])
    assert alone.caller("two") == Caller("default", admin=True, key="api-key-2")
    assert alone.caller("three") is None
    assert alone.caller("x" * 10_000) is None
    with_admin = Keyring(["one"], ["boss"])
    assert with_admin.caller("one") == Caller("default", admin=False, key="api-key-1")
    assert with_admin.caller("boss") == Caller(None, admin=True, key="admin-key-1")
    file = KeyFile(tmp_path)
    file.create("acme", 1.0)
    beside = Keyring(["one"], file=file).caller("one")
    assert beside is not None
    assert not beside.admin


def test_an_unknown_id_costs_a_comparison_as_a_known_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(
        "agentserve.server.tenants.keys.hmac.compare_digest", lambda a, b: compared.append(len(a)) or a == b
    )
    KeyTable(b"p" * 32).caller(new_key()[1])
    assert compared == [32]


# --- the command line --------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["keys", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_line_makes_lists_and_revokes(tmp_path: Path) -> None:
    at = ("--data-dir", str(tmp_path))
    code, out, told = run("create", "--tenant", "acme", *at)
    key = out.strip()
    assert (code, key_id(key) is not None) == (0, True)
    assert "shown this once" in told
    assert key not in told
    run("create", "--tenant", "acme", *at)
    run("create", "--admin", *at)
    _, out, _ = run("list", *at)
    assert [line.split("  ")[1].strip() for line in out.splitlines()] == ["of acme", "of acme", "an admin's"]
    assert key not in out
    assert run("list", "--tenant", "nobody", *at)[1] == ""
    assert run("revoke", str(key_id(key)), *at)[0] == 0
    code, _, told = run("revoke", str(key_id(key)), *at)
    assert (code, told) == (1, "agentserve: no such key that holds\n")
    assert run("revoke", "--tenant", "acme", *at)[1].count("revoked") == 1
    assert run("list", *at)[1].count("revoked") == 2


def test_the_command_line_rotates(tmp_path: Path) -> None:
    at = ("--data-dir", str(tmp_path))
    old = run("create", "--tenant", "acme", *at)[1].strip()
    code, out, told = run("rotate", str(key_id(old)), "--grace-seconds", "3600", *at)
    new = out.strip()
    assert (code, key_id(new) is not None, "shown" in told or str(key_id(old)) in told) == (0, True, True)
    ring = Keyring(file=KeyFile(tmp_path / "tenants"))
    assert [ring.caller(key) is not None for key in (old, new)] == [True, True]
    assert [line.split("  ")[-1].partition(" 2")[0] for line in run("list", *at)[1].splitlines()] == [
        "holds until",
        "holds",
    ]
    assert run("rotate", str(key_id(old)), *at)[0] == 0  # at once: its grace is over, too
    ring.look()
    assert ring.caller(old) is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("create",), "one of the two"),
        (("create", "--tenant", "a", "--admin"), "one of the two"),
        (("create", "--tenant", "a b"), "a tenant's name"),
        (("create", "--tenant", "x" * 65), "a tenant's name"),
        (("revoke",), "one of the two"),
        (("revoke", "--tenant", "a/b"), "no tenant's name"),
        (("revoke", "123"), "no such key"),
        (("rotate", "123"), "no such key"),
        (("rotate", "123", "--grace-seconds", "-1"), "must be 0 to"),
        (("rotate", "123", "--grace-seconds", "1e9"), "must be 0 to"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    code, _, error = run(*arguments, "--data-dir", str(tmp_path))
    assert code == 1
    assert told in error
    assert error.count("\n") == 1
    assert not (tmp_path / "tenants" / "keys.json").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    code, _, error = run("create", "--admin", "--data-dir", str(tmp_path))
    assert (code, error.count("\n")) == (1, 1)


# --- the configuration -------------------------------------------------------------------


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return path


def test_limits_of_all_tenants_and_of_one(tmp_path: Path) -> None:
    text = """
[limits]
requests_per_minute = 60
stored_bytes = "1GiB"
[tenants.acme]
requests_per_minute = "none"
tokens_per_minute = 1000
"""
    tenants = load({}, config(tmp_path, text)).tenants
    assert (tenants.of("x").requests_per_minute, tenants.of("x").stored_bytes) == (60, 2**30)
    acme = tenants.of("acme")
    assert (acme.requests_per_minute, acme.tokens_per_minute, acme.stored_bytes) == (None, 1000, 2**30)
    assert load({}).tenants.of("acme").requests_per_minute is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[limits]\nrequests = 3", "[limits] requests: unknown limit"),
        ("[limits]\nsessions = 0", "[limits] sessions: expected an integer ≥ 1"),
        ('[limits]\nstored_bytes = "lots"', "[limits] stored_bytes: expected a size"),
        ("limits = 3", "[limits]: expected a table"),
        ("tenants = 3", "[tenants]: expected a table"),
        ("[tenants]\nacme = 3", "[tenants.acme]: expected a table"),
        ('[tenants."a b"]\nsessions = 3', "[tenants.a b]: a tenant's name is"),
        (f"[tenants.{'x' * 65}]\nsessions = 3", "a tenant's name is"),
        ("[tenants.ask_0123456789ab_0ff1ce]\nsessions = 0", "cannot be called like a key"),
        ("[tenants.x-ASK_0123456789AB_0ff1ce]\nsessions = 3", "cannot be called like a key"),
        ('[http]\nadmin_keys = ["a"]\napi_keys = ["a"]', "cannot be a tenant's too"),
        ('[http]\nadmin_keys = [""]', "expected a text"),
        ('[http]\napi_keys = ["the-secret\\u0000"]', "expected a text"),
    ],
)
def test_wrong_settings_name_their_place_and_no_secret(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        load({}, config(tmp_path, text))
    assert told in str(error.value)
    assert "the-secret" not in str(error.value)
    assert "0ff1ce" not in str(error.value)


def test_other_machines_are_served_with_keys_only(tmp_path: Path) -> None:
    public = {"host": "0.0.0.0", "data_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match="agentserve keys create"):
        load(public)
    assert load(public | {"admin_key": "k"}).http.admin_keys == ("k",)
    KeyFile(tmp_path / "tenants").create("acme", 1.0)
    assert json.loads((tmp_path / "tenants" / "keys.json").read_text())["version"] == 1
    assert load(public).http.host == "0.0.0.0"
