"""Dense nets and their computation.

``net_builder`` builds the net of a configuration: one of ``hybrid.models``, or a custom net.
``dense_optimizer`` updates nets, ``matmul`` multiplies matrices, ``compilation`` compiles stages of a net,
``devices`` selects devices, and ``hosted_net`` hosts a net on a worker. ``vector_columns`` finds columns in
the input of a net, and ``sync_batch_norm`` normalizes by the global batch. ``data_parallel`` distributes a
net over devices, ``tensor_parallel`` over trainers. ``hybrid.engine`` combines these modules.
"""
