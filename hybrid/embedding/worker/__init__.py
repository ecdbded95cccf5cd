"""The worker's side of embedding tables: rows, and the optimizers that update them.

The master creates ``table_shards`` on a worker; trainers call its ``lookup`` through the transport. It has
``table_groups`` of rows, which ``row_optimizers`` update. ``initial_rows`` are the rows of a new table;
``pre_update_rows`` are those that the first step of a resumed run reads.
"""
