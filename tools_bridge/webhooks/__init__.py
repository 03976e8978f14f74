"""Webhooks: events and tool calls, delivered to addresses that strangers name.

Read `types.py` (the values), then what is pure: `signing.py`, `callback.py`, `schedule.py`, `replies.py`
(what an answer means), `breaker.py`, `lanes.py` (who is next), `address.py` (where may be dialled),
`ledger.py` and `history.py` (what is owed, and what was). What is not: `dial.py` and `attempt.py` (one
attempt), `store.py` and `writer.py` (LMDB), `outbox.py` (the ledger, kept), `courier.py` (takes what is due
to its endpoints).
"""
