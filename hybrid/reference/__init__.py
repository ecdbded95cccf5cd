"""The reference: training in one process of plain torch.

``hybrid compare`` and tests/comparison compare the reference with a cluster. The reference follows the
definitions and shares no arithmetic with other packages. ``reference_training`` trains, ``reference_losses``
computes losses, ``reference_rows`` updates tables, and ``reference_keys`` lets tables grow.
"""
