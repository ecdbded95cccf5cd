"""Building blocks that use no other package: timings, progress, hashes, groups of samples, huge pages.

Start with ``deferred_response``: a function that is called by RPC returns one if its result is not ready yet.
"""
