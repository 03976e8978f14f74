"""AgentServe beside another engine, in alternation on one machine: ratios instead of absolute times.

`peers` is the whole of it: `plan` says what is run and in which order, `contest` runs it, `result` is what
is found. Every contestant is a process of its own: a server spoken to over HTTP (`served`), or a library
behind JSON lines (`piped`), whose other end is a script in `drivers/` that runs in the peer's Python and
imports nothing of ours.
"""
