"""Parsing: input files to columns, with exact line numbers.

``input_files`` lists files. ``sources`` cuts files into segments, and separates valid rows (``RawBlock``)
from invalid rows. ``column_layout`` defines the columns of a file. ``delimited_text`` and ``parquet_blocks``
each read one format, in blocks of bounded size. ``side_tables`` reads the tables that are joined to the rows.
``column_check`` checks the columns of the first files before a run starts.
"""
