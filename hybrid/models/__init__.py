"""Recommendation models from the literature, as short modules over embedding vectors.

Each module names a paper and its equations. It has the layers that the paper introduces, the model, and its
loss if it has one of its own: one value per sample, as ``cluster.backward`` takes it. Models take vectors, so
they work with ``hybrid.Embedding`` and with any other embedding.

Every parameter gets a gradient from every batch, also from an empty one. The scores of a sample do not depend
on other samples: there is no batch normalization. Any number of trainers therefore computes the same result.

``dense_net`` defines the three stages of the models for click logs, ``mlp`` the plain nets in all models, and
``padding`` pads histories of different lengths. docs/models.md compares the models; ``examples`` has a script
that trains each of them.
"""
