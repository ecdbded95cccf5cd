"""Recommendation models from the literature, as short modules over embedding vectors.

The module of a model names a paper and its equations. It has the layers that the paper introduces, the
model, and the loss of the paper if it is not a standard loss. Losses have one value per sample, as
``cluster.backward`` takes them. Models take vectors, so they work with ``hybrid.Embedding`` and with any
other embedding.

Every parameter gets a gradient from every batch, also from an empty batch. The scores of a sample do not
depend on other samples: there is no batch normalization. So neither scores nor losses depend on the number of
trainers. The exception is ``two_towers.in_batch_softmax`` without ``gather``.

``dense_net`` defines the three stages of the models for click logs. ``layers`` has multilayer perceptrons and
the padding of histories. docs/models.md compares the models; ``examples`` has scripts that train them.
"""
