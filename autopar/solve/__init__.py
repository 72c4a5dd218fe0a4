"""The integer program: a strategy for each op, a conversion for each value and type."""
