"""One file per form in which models write tool calls."""
