"""Custom training loops: a script's module and loop on a cluster, or in one process.

The modules, first those that a batch passes through::

    cluster            the interface of a script: connect, distribute, batches, backward, checkpoints
    local_batches      the script's batches, or prepared data, cut into one slice per trainer
    stream_data        the rows of a stream: each trainer reads its slice of every step
    drawn_negatives    negative items, drawn at random in each step and added to the batch
    embedding_modules  tables as modules: Embedding and EmbeddingBag
    training_loop      the step: lookups, backward pass, clipping, optimizer
    step_states        the states of the loop, and the calls that each state permits
    trainer_group      collective operations: sums, gathered values, comparison of the trainers' batches
    loop_warnings      warnings about calls of PyTorch that affect the parameters, but not the tables
    loop_state         the passes over data, and the state from which a script resumes
    script_log         the numbers that a script logs
    backend            access to the tables, in this process or on a cluster (package ``workers``)
"""
