"""DeepFM on a click log.

Run it by ``python examples/deepfm.py``, or on a cluster by
``hybrid run examples/deepfm.py --trainers 2 --workers 2``.
``--config FILE`` trains on the click log of a configuration instead of the built-in one.
"""

import click_log

from hybrid.models.deepfm import DeepFM

if __name__ == "__main__":
    click_log.main(
        lambda num_dense, num_vectors: DeepFM(num_dense, num_vectors, click_log.DIM), click_log.DIM + 1
    )
