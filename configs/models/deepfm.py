"""DeepFM on a click log: python configs/models/deepfm.py"""

import click_log

from hybrid.models.deepfm import DeepFM

if __name__ == "__main__":
    click_log.main(
        lambda num_dense, num_vectors: DeepFM(num_dense, num_vectors, click_log.DIM), click_log.DIM + 1
    )
