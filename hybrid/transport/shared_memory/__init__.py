"""Memory that roles of one host share; start with ``shared_block`` and ``lent_blocks``."""
