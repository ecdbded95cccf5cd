"""The batches of a trainer: its slice of each step, read ahead in a thread."""
