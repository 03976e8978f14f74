"""The time of deadlines: what sets the machine's clock, and what starts the server again, changes nothing."""

import json
import time

import pytest

from tools_bridge.webhooks import clock
from tools_bridge.webhooks.clock import FILE, LoopTime


class Machine:
    """Its clocks, and which boot it is in."""

    def __init__(self, monkeypatch, path):
        self.wall, self.up, self._boot = 1_800_000_000.0, 50.0, path / "boot_id"
        self.boot("one")
        monkeypatch.setattr(clock, "_BOOT", self._boot)
        monkeypatch.setattr(clock, "passed", lambda: self.up)
        monkeypatch.setattr(time, "time", lambda: self.wall)

    def boot(self, name):
        self._boot.write_text(f"{name}\n")
        self.up = 50.0

    def no_boot(self):
        self._boot.unlink()

    def passes(self, seconds):
        self.wall += seconds
        self.up += seconds


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def server(folder):
    told = LoopTime(folder)
    told.keep(folder)
    return told


@pytest.mark.parametrize("jump", [-7200.0, 7200.0, 1e9])
def test_setting_the_clock_changes_nothing(machine, tmp_path, jump):
    told = server(tmp_path)
    began = told.now()
    assert began == machine.wall
    machine.wall += jump
    machine.passes(10)
    assert told.now() == began + 10
    assert told.unix() == began + 10 + jump
    for life in range(3):
        machine.wall -= jump / 2
        machine.passes(10)
        assert server(tmp_path).now() == began + 20 + 10 * life


def test_after_a_boot_the_clock_is_believed(machine, tmp_path):
    server(tmp_path)
    machine.wall += 9000
    machine.boot("two")
    assert server(tmp_path).now() == machine.wall
    machine.wall -= 100
    assert server(tmp_path).now() == machine.wall + 100


def test_where_nobody_says_which_boot_it_is(machine, tmp_path):
    machine.no_boot()
    server(tmp_path)
    machine.wall += 100
    assert server(tmp_path).now() == machine.wall


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b'{"boot": "one"}', b'{"boot": "one", "passed": "x", "unix": 1}']
)
def test_a_file_that_says_nothing(machine, tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    told = server(tmp_path)
    assert told.now() == machine.wall
    assert json.loads((tmp_path / FILE).read_bytes())["boot"] == "one"
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_this_machine():
    told = LoopTime()
    before = told.now()
    assert told.anchor.boot
    assert told.now() >= before >= told.anchor.unix
