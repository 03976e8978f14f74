"""URLs and addresses that are not what they seem."""

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
    *("https://a.example:443@10.0.0.1/", "https://a.example%40127.0.0.1/", "https://10.0.0.1:80@a.example/"),
    *("https://a.example:@127.0.0.1/", "https://:x@a.example/", "https://a.example&@127.0.0.1/"),
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
    *("https://0o177.0.0.1/", "https://0b1111111.0.0.1/", "https://+127.0.0.1/", "https://-1/"),
    *("https://1_27.0.0.1/", "https://127.0.0.0177/", "https://0300.0250.1.1/"),
    *("https://0xa9fea9fe/", "https://2852039166/", "https://025177524776/", "https://169.254.43518/"),
    *("https://0xA9.0xFE.0xA9.0xFE/", "https://0251.0376.0251.0376/", "https://0000169.254.169.254/"),
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
    *("https://[::ffff:0:0]/", "https://[::ffff:169.254.169.254]/", "https://[0:0:0:0:0:ffff:a9fe:a9fe]/"),
    *("https://[::ffff:100.64.0.1]/", "https://[64:ff9b::a9fe:a9fe]/", "https://[64:ff9b::169.254.169.254]/"),
    *("https://[2002:a9fe:a9fe::]/", "https://[2002:c0a8:101::1]/", "https://[2001:10::1]/"),
    *("https://[FD00::1]/", "https://[fd20:ce::254]/", "https://[fdff:ffff::1]/", "https://[::ffff:1]/"),
    *("https://[::1%25lo]/", "https://[::1%lo]/", "https://[ fd00::1]/", "https://[2606:4700::1111]]/"),
    *(
        "https://[[::1]]/",
        "https://[::1].example/",
        "https://[::ffff:127.0.0.1.1]/",
        "https://[::ffff:0177.0.0.1]/",
    ),
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
