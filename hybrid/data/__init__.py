"""The samples: from files to batches.

Raw input is read and encoded once, into a prepared data set on disk; training then reads its rows at random::

    files ── parts ── sources ──> RawBlock ── spill, encode ──> EncodedBlock ── split_writer ──┐
    synthetic ─────────────────────────────────────────────────────^      cache_folder/FINGERPRINT
    Batch <── loader ── order[step * batch : (step + 1) * batch], a share each ── storage ─────┘

Preparing first, rather than streaming text into training, is what buys exactness: the number of rows is
known, every epoch is an exact shuffle, a position is just (epoch, step), and step ``s`` holds the same
samples however many trainers share them. Text is parsed once, not once an epoch by each trainer:
``from_files`` has processes do it part by part, of this host (``pool``) and of others that see the same files
or share a store (``other_hosts``), and ``stages`` is what is done with a part.

Where the cache is in a store, ``located`` sends what was prepared there, in chunks of rows, and trainers have
the chunks of their steps fetched ahead (``far``, ``fetched``); ``order`` says which rows these are.

``targets`` reads what is to be predicted, and ``split`` says which rows are held out for testing.
``new_files`` encodes further files as a model has learnt to.

Begin with ``prepared``, which the master calls, and ``loader``, which every trainer reads.
"""
