"""Encrypted connections between trainers and workers; start with ``socket_calls``."""
