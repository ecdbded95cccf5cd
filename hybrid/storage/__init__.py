"""Files of this machine and of object stores. Without torch.

``remote_path`` parses paths and URLs. ``files`` reads, writes, lists and removes files at either.
``object_stores`` has the clients of stores, and remedies for their errors. ``private_files`` creates
folders and files that only their owner can read, ``locked_folders`` folders that one process may write.
"""
