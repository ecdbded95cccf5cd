"""DCN-v2 on a click log: python configs/models/dcn_v2.py"""

import click_log

from hybrid.models.dcn_v2 import DCNv2

if __name__ == "__main__":
    click_log.main(lambda num_dense, num_vectors: DCNv2(num_dense + num_vectors * click_log.DIM))
