"""Training in one process of plain torch, which ``hybrid compare`` and tests/comparison compare with the
cluster.

It follows the definitions and shares no arithmetic with the rest: ``reference_training`` trains,
``reference_losses`` computes losses, ``reference_rows`` updates tables, and ``reference_schedule`` learning
rates.
"""
