"""Embedding tables: code that the trainer's side and the worker's side of a lookup share.

``table_spec`` describes a table. ``placement`` assigns rows to workers. ``initial_rows`` fills new tables
with random rows, or with rows that ``stored_matrix`` and ``saved_tables`` read from files and other runs.
``bags`` has requests and pooling, and ``row_gradients`` sums gradients by row. ``kernels`` are compiled by
numba. The packages ``trainer`` and ``worker`` are the two sides; neither imports the other. ``table_source``
has the calls of the trainer.
"""
