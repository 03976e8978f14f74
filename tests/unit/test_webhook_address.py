"""Where may be dialled: every way to write an address that is not where it seems."""

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools_bridge.webhooks.address import AddressPolicy, Refused, checked, parse

STRICT = AddressPolicy()
PRIVATE = AddressPolicy(allow_private=True)

TRICKS = [
    # schemes, and what is no URL
    *("", "hook", "//a.example/", "file:///etc/passwd", "unix:///run/x.sock", "gopher://a.example/"),
    *(
        "ftp://a.example/",
        "http+unix://%2frun%2fx/",
        "javascript:alert(1)",
        "data:text/plain,x",
        "https:/a.example",
    ),
    *(
        "https:a.example",
        "https:///a.example",
        "https://",
        "https:///",
        "https://:443/",
        "https://?x",
        "https://#",
    ),
    # who asks
    *(
        "https://user@a.example/",
        "https://user:pass@a.example/",
        "https://@a.example/",
        "https://a.example@10.0.0.1/",
    ),
    *("https://127.0.0.1#@a.example/", "https://a.example#@127.0.0.1/", "https://a.example/#frag"),
    # characters
    *(
        "https://a.example\\@127.0.0.1/",
        "https://a.example\\.evil/",
        "https:\\\\a.example/",
        "https://a.example/ x",
    ),
    *("https://a.example/\r\nx: y", "https://a.example\r\n/", "https://a.\texample/", "https://a.example/\0"),
    *(" https://a.example/", "https://a.example/ ", "https://a.example/ü", "https://a.exa\x7fmple/"),
    *(
        "https://%31%32%37.0.0.1/",
        "https://127.0.0.1%2f.a.example/",
        "https://a%00.example/",
        "https://a.example%23/",
    ),
    # digits and dots that are none
    *("https://①②⑦.⓪.⓪.①/", "https://１２７.0.0.1/", "https://127。0。0。1/", "https://127．0．0．1/"),
    *("https://ⓛocalhost/", "https://localhoſt/", "https://bücher.example/", "https://١٢٧.٠.٠.١/"),
    # IPv4 in other forms
    *(
        "https://2130706433/",
        "https://0x7f000001/",
        "https://0X7F000001/",
        "https://017700000001/",
        "https://127.1/",
    ),
    *(
        "https://127.0.1/",
        "https://0177.0.0.1/",
        "https://0x7f.0.0.1/",
        "https://127.0.0.01/",
        "https://127.0.0.1./",
    ),
    *(
        "https://127.0.0.0x1/",
        "https://127.0.0.1.1/",
        "https://1.1.1.256/",
        "https://0/",
        "https://00.0.0.0/",
    ),
    *("https://0x/", "https://a.example.0x7f/", "https://a.1/", "https://8.8.8/", "https://134744072/"),
    *("https://999.1.1.1/", "https://4294967297/", "https://1.1.1.1.in-addr.arpa/"),
    # IPv6
    *("https://[::1]/", "https://[::]/", "https://[0:0:0:0:0:0:0:1]/", "https://[::ffff:127.0.0.1]/"),
    *(
        "https://[::ffff:7f00:1]/",
        "https://[::127.0.0.1]/",
        "https://[::ffff:0:127.0.0.1]/",
        "https://[fe80::1]/",
    ),
    *(
        "https://[fe80::1%25eth0]/",
        "https://[fe80::1%eth0]/",
        "https://[2606:4700::1111%1]/",
        "https://[fd00::1]/",
    ),
    *(
        "https://[fd00:ec2::254]/",
        "https://[ff02::1]/",
        "https://[64:ff9b::127.0.0.1]/",
        "https://[64:ff9b::a00:1]/",
    ),
    *("https://[64:ff9b:1::8.8.8.8]/", "https://[2002:7f00:1::]/", "https://[2002:808:808::1]/"),
    *(
        "https://[2001:0:7f00:1::]/",
        "https://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/",
        "https://[2001:db8::1]/",
    ),
    *("https://[2606:4700::5efe:a00:1]/", "https://[2606:4700::200:5efe:7f00:1]/", "https://[100::1]/"),
    *(
        "https://[fec0::1]/",
        "https://[v1.x]/",
        "https://[]/",
        "https://[::1/",
        "https://::1/",
        "https://[::1]x/",
    ),
    *("https://[127.0.0.1]/", "https://[a.example]/", "https://[3fff::1]/", "https://[5f00::1]/"),
    # IPv4 ranges
    *("https://127.0.0.1/", "https://127.255.255.254/", "https://10.0.0.1/", "https://172.16.0.1/"),
    *("https://172.31.255.255/", "https://192.168.1.1/", "https://169.254.169.254/latest/meta-data/"),
    *(
        "https://100.64.0.1/",
        "https://100.100.100.200/",
        "https://0.0.0.0/",
        "https://0.1.2.3/",
        "https://192.0.0.192/",
    ),
    *("https://192.0.2.1/", "https://198.18.0.1/", "https://198.51.100.1/", "https://203.0.113.9/"),
    *("https://224.0.0.1/", "https://239.255.255.250/", "https://240.0.0.1/", "https://255.255.255.255/"),
    *("https://168.63.129.16/", "https://192.88.99.1/"),
    # names of the inside
    *(
        "https://localhost/",
        "https://LOCALHOST/",
        "https://localhost./",
        "https://x.localhost/",
        "https://a.local/",
    ),
    *(
        "https://localhost.localdomain/",
        "https://metadata.google.internal/",
        "https://metadata/",
        "https://db/",
    ),
    *("https://ip6-localhost/", "https://router.lan/", "https://x.home.arpa/", "https://a.example./"),
    # names that are none
    *(
        "https://a..example/",
        "https://.example/",
        "https://-a.example/",
        "https://a-.example/",
        "https://*.example/",
    ),
    *(
        f"https://{'a' * 64}.example/",
        f"https://{'a.' * 127}example/",
        "https://a,b.example/",
        "https://a;b.example/",
    ),
    # ports
    *(
        "https://a.example:0/",
        "https://a.example:65536/",
        "https://a.example:99999/",
        "https://a.example:-1/",
    ),
    *("https://a.example:/", "https://a.example:22/", "https://a.example:25/", "https://a.example:6379/"),
    *(
        "https://a.example:4４3/",
        "https://a.example:443x/",
        "https://a.example:443:443/",
        "https://a.example: 443/",
    ),
    *("https://a.example:11211/", "https://a.example:0443443/", "https://1.1.1.1:53/"),
    # no TLS
    *("http://a.example/", "HTTP://a.example/", "http://1.1.1.1/"),
    "https://a.example/" + "x" * 2048,
]


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


PUBLIC = [
    "1.1.1.1",
    "8.8.8.8",
    "100.63.255.255",
    "172.32.0.1",
    "2606:4700::1111",
    "64:ff9b::808:808",
    "::ffff:8.8.8.8",
]
INSIDE = [
    "127.0.0.1",
    "10.1.2.3",
    "172.16.5.4",
    "192.168.0.1",
    "100.64.1.1",
    "::1",
    "fd12::1",
    "::ffff:10.0.0.1",
]
INSIDE += ["64:ff9b::10.0.0.1", "192.0.2.7", "2606:4700::5efe:10.0.0.1"]
NOBODYS = [
    "0.0.0.0",
    "169.254.169.254",
    "224.0.0.1",
    "255.255.255.255",
    "240.1.1.1",
    "::",
    "fe80::1",
    "ff02::1",
]
NOBODYS += [
    "::ffff:169.254.169.254",
    "::ffff:0.0.0.0",
    "64:ff9b::169.254.169.254",
    "2002:a9fe:a9fe::1",
    "::1.1.1.1",
]
NOBODYS += [
    "168.63.129.16",
    "100.100.100.200",
    "fd00:ec2::254",
    "2001:0:1::1",
    "fec0::1",
    "64:ff9b:1::1",
    "100::1",
]
BROKEN = [
    "",
    "a.example",
    "1.1.1",
    "0x7f.1",
    "fe80::1%eth0",
    "2606:4700::1111%2",
    "1.1.1.1 ",
    "１.1.1.1",
    "[::1]",
]


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
