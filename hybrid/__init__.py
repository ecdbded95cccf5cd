"""Hybrid-parallel training: data-parallel dense nets, embedding tables on remote workers.

This package knows tensors and tables, and nothing of processes: that is ``workers``. Begin with ``training``,
a trainer's step, and follow it down; docs/design.md has the rooms, and the way of one id through them.
"""

__version__ = "0.1.0"
