"""Replays of agents' sessions by load generators that others wrote, in Python environments of their own."""
