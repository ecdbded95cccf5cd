"""Kill roles at random and compare the result with an undisturbed run: ``scripts/chaos``."""
