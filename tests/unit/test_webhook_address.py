"""Where may be dialled: every way to write an address that is not where it seems."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ssrf_tricks import BROKEN, INSIDE, NOBODYS, PUBLIC, TRICKS
from tools_bridge.webhooks.address import AddressPolicy, Refused, checked, parse

STRICT = AddressPolicy()
PRIVATE = AddressPolicy(allow_private=True)


@pytest.mark.parametrize("url", TRICKS)
def test_tricks(url):
    with pytest.raises(Refused) as caught:
        parse(url, STRICT)
    assert len(str(caught.value)) < 120


@pytest.mark.parametrize(
    ("url", "parts", "authority"),
    [
        ("https://a.example", ("https", "a.example", 443, "/"), "a.example"),
        ("HTTPS://A.Example:443/Hook?x=1&y=%20", ("https", "a.example", 443, "/Hook?x=1&y=%20"), "a.example"),
        ("https://a.example:8443?x=//b@c", ("https", "a.example", 8443, "/?x=//b@c"), "a.example:8443"),
        (
            "https://xn--bcher-kva.example/@x",
            ("https", "xn--bcher-kva.example", 443, "/@x"),
            "xn--bcher-kva.example",
        ),
        ("https://my_hooks.1a.example/", ("https", "my_hooks.1a.example", 443, "/"), "my_hooks.1a.example"),
        ("https://1.1.1.1/", ("https", "1.1.1.1", 443, "/"), "1.1.1.1"),
        (
            "https://[2606:4700:0::1111]:8000/x",
            ("https", "2606:4700::1111", 8000, "/x"),
            "[2606:4700::1111]:8000",
        ),
        ("https://a.example:80/", ("https", "a.example", 80, "/"), "a.example:80"),
    ],
)
def test_plain_urls(url, parts, authority):
    target = parse(url, STRICT)
    assert (target.scheme, target.host, target.port, target.target) == parts
    assert target.authority == authority


@pytest.mark.parametrize("answer", PUBLIC)
def test_public_addresses(answer):
    assert checked("a.example", [answer], STRICT)


@pytest.mark.parametrize("answer", INSIDE + NOBODYS + BROKEN)
def test_one_bad_answer_among_good_ones_is_enough(answer):
    for answers in ([answer], ["1.1.1.1", answer], [answer, "1.1.1.1"], ["1.1.1.1", answer, "8.8.8.8"]):
        with pytest.raises(Refused):
            checked("a.example", answers, STRICT)


@pytest.mark.parametrize("answer", INSIDE)
def test_private_ones_if_they_are_allowed(answer):
    assert checked("a.example", [answer, "1.1.1.1"], PRIVATE)
    assert checked("a.example", [answer], AddressPolicy(hosts=("A.example",)))
    assert checked("b.a.example", [answer], AddressPolicy(hosts=(".a.example",)))
    for hosts in ((".a.example",), ("example",), ("aa.example",), (".b.example",)):
        with pytest.raises(Refused):
            checked("a.example", [answer], AddressPolicy(hosts=hosts))


@pytest.mark.parametrize("answer", NOBODYS + BROKEN)
def test_what_is_nobodys_or_a_clouds_own_only_by_its_network(answer):
    with pytest.raises(Refused):
        checked("a.example", [answer], PRIVATE)
    if answer in NOBODYS and not answer.startswith("::ffff"):
        network = AddressPolicy(networks=(ip_network(answer),))
        assert checked("a.example", [answer], network) == (ip_address(answer),)


def test_a_network_that_is_allowed_opens_no_other():
    policy = AddressPolicy(networks=(ip_network("10.1.0.0/16"), ip_network("fd12::/16")))
    assert checked("a.example", ["10.1.9.9", "::ffff:10.1.2.3", "fd12::5", "8.8.8.8"], policy)
    for other in ("10.2.0.1", "127.0.0.1", "fd13::1"):
        with pytest.raises(Refused):
            checked("a.example", ["10.1.9.9", other], policy)
    assert parse("http://10.1.2.3:6379/", policy).port == 6379
    with pytest.raises(Refused):
        parse("http://10.2.2.3/", policy)


def test_what_a_mapped_address_stands_for_is_dialled():
    assert checked("a", ["::ffff:8.8.8.8", "8.8.8.8"], STRICT) == (IPv4Address("8.8.8.8"),)


def test_no_answer_and_too_many():
    for answers in ([], ["1.1.1.1"] * 65):
        with pytest.raises(Refused):
            checked("a.example", answers, STRICT)


def test_what_allow_private_opens():
    for url in (
        "http://localhost:8000/",
        "http://127.0.0.1:6379/x",
        "https://db/",
        "http://[::1]:22/",
        "http://a.local",
    ):
        parse(url, PRIVATE)
    for url in (
        "http://169.254.169.254/",
        "http://0.0.0.0/",
        "ftp://localhost/",
        "http://u@localhost/",
        "http://0x7f.1",
    ):
        with pytest.raises(Refused):
            parse(url, PRIVATE)
    assert parse("http://a.example/", AddressPolicy(allow_http=True)).port == 80
    with pytest.raises(Refused):
        parse("http://127.0.0.1/", AddressPolicy(allow_http=True))


@given(st.ip_addresses())
def test_no_policy_but_a_network_opens_what_python_calls_special(address):
    try:
        (inner,) = checked("a.example", [str(address)], STRICT)
    except Refused:
        return
    if isinstance(inner, IPv6Address) and inner in ip_network("64:ff9b::/96"):
        inner = IPv4Address(int(inner) & 0xFFFFFFFF)
    assert inner.is_global
    for special in (
        "is_private",
        "is_loopback",
        "is_multicast",
        "is_link_local",
        "is_reserved",
        "is_unspecified",
    ):
        assert not getattr(inner, special), special


SPECIAL4 = [
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
    *("192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4"),
]
FORMS = [  # in which an IPv4 address is inside another
    lambda v4: v4,
    lambda v4: f"::ffff:{v4}",
    lambda v4: f"::{v4}",
    lambda v4: f"::ffff:0:{v4}",
    lambda v4: f"64:ff9b::{v4}",
    lambda v4: f"64:ff9b:1::{v4}",
    lambda v4: str(IPv6Address(0x2002 << 112 | int(IPv4Address(v4)) << 80 | 1)),
    lambda v4: str(IPv6Address(0x20010000 << 96 | int(IPv4Address(v4)) ^ 0xFFFFFFFF)),
    lambda v4: str(IPv6Address(0x2606 << 112 | 0x5EFE << 32 | int(IPv4Address(v4)))),
    lambda v4: str(IPv6Address(0x2606 << 112 | 0x200_5EFE << 32 | int(IPv4Address(v4)))),
]


@given(st.sampled_from(SPECIAL4), st.integers(min_value=0), st.sampled_from(FORMS), st.booleans())
def test_a_special_address_is_one_however_it_is_written(network, number, form, literal):
    inside = ip_network(network)
    address = form(str(inside[number % inside.num_addresses]))
    url = f"https://[{address}]/" if ":" in address else f"https://{address}/"
    with pytest.raises(Refused):
        parse(url, STRICT) if literal else checked("a.example", ["1.1.1.1", address], STRICT)


@given(st.text(max_size=60) | st.from_regex(r"https?://[!-~]{0,40}", fullmatch=True))
def test_any_text_is_a_target_or_refused(url):
    try:
        target = parse(url, PRIVATE)
    except Refused:
        return
    assert target.host
    assert target.target.startswith("/")
    again = parse(f"{target.scheme}://{target.authority}{target.target}", PRIVATE)
    assert again == target  # there is one way to read it
