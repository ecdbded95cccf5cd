"""A prepared data set, on disk or in an object store, and the order in which an epoch reads its rows.

Begin with ``prepared_dataset``.
"""
