"""Embedding tables: code that the trainer's side and the worker's side of a lookup share.

``table_spec`` describes a table. ``placement`` assigns rows to workers. ``initial_rows`` fills new tables
with random rows, or with rows that ``stored_matrix`` and ``saved_tables`` read from files and other runs.
``table_source`` declares the methods that a trainer calls on a worker. ``bags`` defines the requests of a
lookup, and pools bags. ``row_gradients`` sums gradients by row. ``kernels`` are compiled by numba. The
packages ``trainer`` and ``worker`` are the two sides; neither imports the other.
"""
