"""Rules of scheduling: how much of a turn runs in a step, whose turn is next, and what it costs whom.

Each module is one published rule, or one of our own, as a small pure class that names its objective. The
scheduler (`core/scheduler.py`) owns the queues and asks; nothing here knows pages, plans or sessions.
"""
