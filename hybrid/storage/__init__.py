"""Where things lie: paths of this machine, and places in stores that are reached by a URL. Free of torch.

Begin with ``places``: what may be named. ``files`` reads, writes, lists and removes either kind, ``stores``
is all that knows how a store is reached, and what its errors mean. docs/storage.md has what a user needs.
"""
