"""A module and a training loop of the user's own: any structure, any outputs, any loss.

Begin with ``cluster``, what ``hybrid.connect`` gives. ``modules`` are the tables that a module of the user's
is made of; ``sites`` says what of a batch they were called with, so that the next batch is looked up before
the module runs; ``loop`` takes the steps. Where tables lie, and who the other trainers are, a ``host`` knows:
this process alone (``alone``), or a cluster (``workers``). Scripts of users call it; it calls ``training``.
"""
