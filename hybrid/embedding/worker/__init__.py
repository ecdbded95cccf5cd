"""A worker's side of the tables: rows, and the optimizers that update them where they lie.

Begin with ``shards``, which the master creates on a worker, and whose ``lookup`` trainers call through
``wire``. It holds ``groups`` of ``rows``, which ``optimizers`` update. ``initial`` has the rows that a table
starts with, ``earlier`` those that a resumed run does; ``stored`` answers lookups out of the files of a
checkpoint, for predictions.
"""
