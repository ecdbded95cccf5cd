"""The samples: from files to batches.

Raw input is read and encoded once, into a prepared data set on disk; training then reads its rows at random::

    files ── sources ──> RawBlock ── encode ──> EncodedBlock ── storage ──> cache_folder/FINGERPRINT
    synthetic ─────────────────────────────────────^                              │ memory-mapped
    Batch <── loader ── order[step * batch : (step + 1) * batch], a share each ───┘

Preparing first, rather than streaming text into training, is what buys exactness: the number of rows is
known, every epoch is an exact shuffle, a position is just (epoch, step), and step ``s`` holds the same
samples however many trainers share them. Text is parsed once, not once an epoch by each trainer.

``targets`` reads what is to be predicted, and ``split`` says which rows are held out for testing.

Begin with ``prepared``, which the master calls, and ``loader``, which every trainer reads.
"""
