"""Calls by RPC; start with ``stubs``."""
