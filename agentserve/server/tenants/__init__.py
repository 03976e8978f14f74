"""Who may use the server, as whom, how much, and what is written down of it. Nothing here knows HTTP."""
