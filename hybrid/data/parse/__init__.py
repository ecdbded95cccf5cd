"""Parsing: input files to columns, with exact line numbers.

``input_files`` lists files. ``sources`` cuts files into segments, and converts rows to a ``RawBlock`` and
invalid rows. ``column_layout`` defines the columns of a file. ``delimited_text`` and ``parquet_blocks`` each
read one format, in blocks of bounded size.
"""
