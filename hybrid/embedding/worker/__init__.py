"""The worker's side of embedding tables: rows, and the optimizers that update them.

The master creates ``TableShards`` on a worker. Trainers call its ``lookup`` through the transport. Rows are
in a ``TableGroup``, or, for a growing table, in a ``GrowingGroup``. A ``RowOptimizer`` updates them.
"""
