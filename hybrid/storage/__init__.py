"""Files of this machine and of object stores. Free of torch.

``remote_path`` parses paths and URLs. ``files`` reads, writes, lists and removes files at either.
``object_stores`` sends requests through ``pyarrow.fs`` and explains its errors; ``store_clients`` sets up the
clients. ``private_files`` makes folders and files that only their owner can read.
"""
