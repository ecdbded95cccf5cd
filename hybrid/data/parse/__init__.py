"""Files to columns: which files, where they are cut, and their rows with exact line numbers.

``input_files`` lists files, ``segments`` cuts them, ``delimited_text`` and ``parquet_blocks`` read them in
blocks of bounded size, and ``sources`` turns a block into a ``RawBlock`` and its invalid rows.
"""
