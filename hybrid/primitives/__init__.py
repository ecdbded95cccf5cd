"""Building blocks that use no other package: timings, progress, hashes, groups of samples, huge pages."""
