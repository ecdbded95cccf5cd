"""The same training in one process of plain torch, to compare the system with.

Begin with ``training``. It is written from the definitions, and shares no arithmetic with the rest:
``rows`` updates tables, ``schedule`` the learning rates, both by ``torch.optim``. ``hybrid compare`` and
tests/comparison call it.
"""
