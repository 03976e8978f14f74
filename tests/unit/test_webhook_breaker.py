"""Circuit breakers."""

from tools_bridge.webhooks.breaker import Breaker, BreakerSettings, Circuit

SETTINGS = BreakerSettings(failures=3, cooldown=10.0, most=35.0)


def fail(breaker, now, times=1):
    for _ in range(times):
        assert breaker.ready_at(now) == now
        breaker.failed(breaker.began(now), now)


def test_it_opens_after_failures_in_a_row():
    breaker = Breaker(SETTINGS)
    fail(breaker, 0.0, 2)
    breaker.succeeded(breaker.began(1.0))
    fail(breaker, 2.0, 2)
    assert breaker.circuit(2.0) is Circuit.CLOSED
    fail(breaker, 3.0)
    assert breaker.circuit(3.0) is Circuit.OPEN
    assert breaker.ready_at(4.0) == 13.0
    assert breaker.circuit(13.0) is Circuit.HALF_OPEN


def test_half_open_it_lets_one_through_whose_end_decides():
    breaker = Breaker(SETTINGS)
    fail(breaker, 0.0, 3)
    probe = breaker.began(10.0)
    assert breaker.ready_at(11.0) is None
    breaker.succeeded(probe)
    assert breaker.circuit(11.0) is Circuit.CLOSED
    assert breaker.ready_at(11.0) == 11.0
    fail(breaker, 12.0, 2)
    assert breaker.circuit(12.0) is Circuit.CLOSED


def test_it_stays_open_longer_each_time_up_to_a_bound():
    breaker, now = Breaker(SETTINGS), 0.0
    fail(breaker, now, 3)
    for cooldown in (10.0, 20.0, 35.0, 35.0):
        assert breaker.ready_at(now) == now + cooldown
        now += cooldown
        fail(breaker, now)
    breaker.succeeded(breaker.began(now + 35.0))
    fail(breaker, now + 40.0, 3)
    assert breaker.ready_at(now + 40.0) == now + 50.0


def test_who_began_before_it_opened_says_nothing_new_by_failing():
    breaker = Breaker(SETTINGS)
    early = [breaker.began(0.0) for _ in range(5)]
    for ticket in early[:3]:
        breaker.failed(ticket, 1.0)
    breaker.failed(early[3], 9.0)
    assert breaker.ready_at(9.0) == 11.0
    probe = breaker.began(11.0)
    breaker.failed(early[4], 12.0)
    assert breaker.ready_at(12.0) is None
    breaker.failed(probe, 13.0)
    assert breaker.ready_at(13.0) == 33.0


def test_who_began_before_it_opened_and_succeeds_closes_it():
    breaker = Breaker(SETTINGS)
    early = breaker.began(0.0)
    fail(breaker, 1.0, 3)
    breaker.succeeded(early)
    assert breaker.ready_at(2.0) == 2.0


def test_an_attempt_that_was_cut_off_decides_nothing():
    breaker = Breaker(SETTINGS)
    fail(breaker, 0.0, 3)
    breaker.cancelled(breaker.began(10.0))
    assert breaker.circuit(10.0) is Circuit.HALF_OPEN
    assert breaker.ready_at(10.0) == 10.0


def test_a_pause_is_no_failure():
    breaker = Breaker(SETTINGS)
    fail(breaker, 0.0, 2)
    breaker.paused(breaker.began(1.0), until=50.0)
    assert breaker.ready_at(2.0) == 50.0
    assert breaker.circuit(2.0) is Circuit.CLOSED
    fail(breaker, 50.0, 2)
    assert breaker.circuit(50.0) is Circuit.CLOSED
