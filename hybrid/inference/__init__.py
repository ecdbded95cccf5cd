"""A trained model without a cluster: as a plain module, as files for others, and with tables of others.

Begin with ``module``: what ``hybrid.load`` gives. ``trained`` reads a checkpoint, ``tables`` and ``pooling``
hold what a served table is, ``export`` writes it all as files that need nothing of this project.
``state_dicts`` and ``name_map`` read tables of other programs, ``imported`` puts them into a checkpoint.
Notebooks call this, and the commands in ``workers/offline``.
"""
