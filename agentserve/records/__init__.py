"""Recordings: what became of every request, and what every iteration did, as JSON lines.

`lines.py` has the fields, `writer.py` writes them beside whoever computes, `reader.py` reads them again.
"""
