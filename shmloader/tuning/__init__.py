"""How many workers: what the machine offers, and what to make of it."""
