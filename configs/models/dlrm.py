"""DLRM on a click log: python configs/models/dlrm.py"""

import click_log

from hybrid.models.dlrm import DLRM

if __name__ == "__main__":
    click_log.main(lambda num_dense, num_vectors: DLRM(num_dense, num_vectors, click_log.DIM))
