"""The reference: training in one process of plain torch.

``hybrid compare`` and tests/comparison compare the reference with a cluster. The losses
and table updates of the reference share no arithmetic with other packages. ``reference_training`` trains,
``reference_losses`` computes losses, ``reference_rows`` updates tables, ``reference_keys`` lets tables grow.
"""
