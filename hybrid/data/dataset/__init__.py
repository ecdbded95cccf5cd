"""A prepared data set, on disk or in an object store, and the order in which an epoch reads its rows.

``prepared_dataset`` gathers batches from arrays on disk, ``fetched_split`` from chunks of a store
(``remote_dataset``), and ``sample_order`` defines the rows of each step.
"""
