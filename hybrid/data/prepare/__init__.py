"""The preparation of a data set: done once, started again after a kill, shared by concurrent runs.

``preparation`` makes sure that the data of a run are prepared, on disk or in a store, and opens them.
``file_preparation`` prepares files in stages, and ``spill`` stores the results of the first stage.
"""
