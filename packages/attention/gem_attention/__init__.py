"""Attention over jagged sequences: one specification, a reference, and implementations compared with it."""
