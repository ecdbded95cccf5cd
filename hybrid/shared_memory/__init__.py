"""Memory that roles of one host share.

``tensor_blocks`` transfers large tensors between two roles. ``shared_slots`` sums dense gradients over the
trainers of one host.
"""
