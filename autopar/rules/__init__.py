"""What sharding a factor of an op means for the others: one op, one line."""
