"""A prepared data set, on disk or in an object store, and the order in which an epoch reads its rows.

``prepared_dataset`` gathers batches from arrays on disk, ``fetched_split`` from chunks of a store, and
``sample_order`` and ``group_order`` define the rows of each step.
"""
