"""Kill roles at random and compare the result with an uninterrupted run: ``scripts/chaos``."""
