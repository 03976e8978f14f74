"""Tools of remote MCP servers, over Streamable HTTP, by the official `mcp` package (the extra `mcp`).

Read `types.py` (the values), `listing.py` (what is believed of a listing) and `results.py` (what a model
reads of a result); these are pure. `remote.py` is the face; it loads `client.py` (one operation), which
speaks over `network.py` (where it dials: only what `webhooks/address.py` found good), when first asked.
"""
