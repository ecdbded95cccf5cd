"""Building blocks that use no other package: timings, progress, hashes, groups of samples, huge pages.

Start with ``deferred_response``: an object that is called by RPC returns one if the result comes later.
"""
