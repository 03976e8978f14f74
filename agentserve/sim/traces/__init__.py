"""Agents as traces: values drawn from a seed, and players that act them against any engine core."""
