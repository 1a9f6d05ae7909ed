"""Losses, log-probabilities and advantages: pure functions of tensors, no model, config or RNG.

Frame: sequences are (B, T); index t of every per-token tensor scores token t+1, so those are (B, T-1).
"""
