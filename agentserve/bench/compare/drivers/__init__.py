"""The other end of the pipes: scripts that run in a contestant's own Python and import nothing of ours."""
