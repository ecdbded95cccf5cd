"""A prepared data set: its manifest, and its arrays on disk."""
