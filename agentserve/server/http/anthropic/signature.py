"""Signatures of thinking blocks: opaque to clients, who send them back as they got them.

Where a client asked for its model's thinking not to be shown, the signature carries it, so that it is
there again when the block comes back. Nothing secret is in it, and nothing depends on it but text.
"""

from __future__ import annotations

import base64
import binascii
from hashlib import sha256

_SHOWN, _HIDDEN = "as1s.", "as1h."


def sign(thinking: str, *, shown: bool) -> str:
    """The signature of a block. `shown`: the block has the thinking itself."""
    data = thinking.encode("utf-8", "surrogatepass")
    if shown:
        return _SHOWN + base64.urlsafe_b64encode(sha256(data).digest()[:18]).decode()
    return _HIDDEN + base64.urlsafe_b64encode(data).decode()


def hidden(signature: str) -> str:
    """The thinking that a signature carries; "" where it is another's, or carries none."""
    if not signature.startswith(_HIDDEN):
        return ""
    try:
        data = base64.b64decode(signature.removeprefix(_HIDDEN), altchars=b"-_", validate=True)
        return data.decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        return ""
