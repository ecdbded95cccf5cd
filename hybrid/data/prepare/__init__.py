"""The preparation of a data set. Concurrent runs share the prepared data.

``preparation`` prepares the data of a run, on disk or in a store, and opens the prepared data.
``file_preparation`` prepares files in stages, and ``spill`` stores the parsed rows between these stages.
``synthetic_log`` generates the synthetic click log. After a kill, a preparation starts from the beginning.
"""
