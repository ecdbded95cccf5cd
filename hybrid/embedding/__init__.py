"""Embedding tables: what the trainer's side and the worker's side of a lookup share.

``table_spec`` describes a table, ``placement`` which worker holds which rows, and ``bags`` a request and how
rows become vectors. ``row_gradients`` turns gradients of vectors into gradients of rows. ``kernels`` has the
compiled loops. The packages ``trainer`` and ``worker`` are the two sides; neither imports the other.
"""
