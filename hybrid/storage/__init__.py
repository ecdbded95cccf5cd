"""Files of this machine and of object stores. Does not import torch.

``remote_path`` parses paths and URLs. ``files`` reads, writes, lists and removes files of both kinds.
``object_stores`` sends requests to stores. ``private_files`` creates private folders, and refuses links.
``locked_folders`` locks folders, and creates folders atomically. ``file_formats`` reads JSON and arrays.
"""
