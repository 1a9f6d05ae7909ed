"""Verifiable rewards in plain Python: read an answer out of a text and compare it, exactly."""
