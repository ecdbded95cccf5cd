"""Where things lie: paths of this machine, and places in stores that are reached by a URL. Free of torch.

Begin with ``places``: what may be named. ``files`` reads, writes, lists and removes either kind, with the
streams of ``remote_files``; ``stores`` asks a store and knows what its errors mean, ``clients`` how it is
reached. docs/storage.md has what a user needs.
"""
