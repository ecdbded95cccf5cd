"""A trainer's step: the model that spans processes, its batches, and how all sides take the step together.

Begin with ``step``, which fits one screen, and ``model``. ``feed`` brings batches with lookups that started
in time, ``ddp`` sums gradients over trainers, ``guard`` decides whether a step is applied. ``tables`` and
``build`` make all of it out of a configuration. The ``Trainer`` of ``workers`` calls it.
"""
