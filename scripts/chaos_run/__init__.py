"""Kills roles at random, and sees whether the end is the same: ``scripts/chaos``."""
