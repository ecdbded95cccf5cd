"""The worker's side of embedding tables: rows, and the optimizers that update them.

The master creates ``table_shards`` on a worker; trainers call ``lookup`` through the transport. Rows are in
``table_groups``, and ``row_optimizers`` update them.
"""
