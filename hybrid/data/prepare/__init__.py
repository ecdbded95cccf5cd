"""The preparation of a data set. Concurrent runs share it; after a kill, it starts again from the beginning.

``preparation`` makes sure that the data of a run are prepared, on disk or in a store, and opens them.
``file_preparation`` prepares files in stages, and ``spill`` stores the parsed rows between these stages.
``synthetic_log`` generates the synthetic click log.
"""
