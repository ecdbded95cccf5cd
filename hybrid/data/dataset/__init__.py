"""A prepared data set, and the order in which an epoch reads its rows.

``prepared_dataset`` gathers batches from arrays on disk, ``remote_dataset`` sends and fetches them, and
``sample_order`` defines the rows of each step.
"""
