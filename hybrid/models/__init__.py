"""Recommenders from the literature: short modules over vectors, to be used, and to be read.

Begin with ``din``. A file holds a paper, its equation, the layers that it introduces, the whole model made of
them, and the loss where it has one of its own: a value a sample, as ``cluster.backward`` takes it. They know
vectors and no tables, so that those of ``hybrid.Embedding`` serve as well as any others. Every parameter gets
a gradient of every batch, an empty one too, and no sample has a say in the scores of another (there is no
batch normalisation): so any number of trainers computes the same.

Models of click logs are nets in three stages (``dense_net``). ``mlp`` has the plain nets in all models, and
``histories`` turns any number of values a sample into a padded matrix. ``dense`` builds what ``dense.net``
names, and scripts of users call all this; docs/models.md compares the models, and examples has a script
for each that trains it.
"""
