"""Memory that roles of one host share; start with ``tensor_blocks`` and ``shared_slots``."""
