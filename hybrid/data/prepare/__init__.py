"""The preparation of a data set: done once, resumed after a kill, shared by concurrent runs.

``dataset_location`` makes sure that the data of a run are prepared, on disk or in a store. ``preparation``
writes them on disk. ``file_preparation`` runs the ``stages`` in threads, and ``spill`` stores their results.
"""
