"""GPT-2's printable alphabet for bytes, as used by every byte-level BPE vocabulary."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    """Printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    table = {chr(byte): byte for byte in plain}
    rest = [byte for byte in range(256) if byte not in plain]
    table.update({chr(0x100 + index): byte for index, byte in enumerate(rest)})
    return table


BYTE_OF = _alphabet()


def piece_bytes(piece: str) -> bytes:
    """The bytes a byte-level token stands for; characters outside the alphabet stand for themselves."""
    try:
        return bytes([BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode("utf-8")
