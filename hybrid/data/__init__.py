"""From input files to the batches of a trainer.

Without ``data.stream``, the input is read and encoded once, into a prepared data set on disk. Training then
reads its rows at random::

    CSV, TSV, Parquet            synthetic click log
          │ parse, values                │
          ▼                              │
      RawBlock: numbers, texts           │
          │ prepare: spill to disk,      │
          │ fit vocabularies and scales  │
          │ encode                       │
          ▼                              ▼
      EncodedBlock: numbers, table rows ─┴─► cache_folder/FINGERPRINT   (or an object store)
                                                  │ dataset: rows of each step, in the order of the epoch
                                                  ▼
                                              batches: the slice of each trainer

- ``parse``: files to columns, with exact line numbers.
- ``values``: columns to labels, numbers and canonical categorical values; invalid rows.
- ``encode``: values to table rows and scaled numbers, fitted on the training rows.
- ``prepare``: the preparation of a data set, in threads, within a memory limit.
- ``dataset``: a prepared data set on disk.
- ``batches``: the order of the rows in an epoch, and a trainer's batches, read ahead.
- ``stream``: rows that trainers read from files or a Kafka topic without preparation, once and in order.

After the preparation, the number of rows is known, and every epoch has an order of all rows. So step ``s`` of
an epoch has the same samples for any number of trainers.
"""
