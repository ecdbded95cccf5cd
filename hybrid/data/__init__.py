"""The samples: from files to batches.

Raw input is read and encoded once, into a prepared data set on disk; training then reads its rows at random::

    files ── sources ──> RawBlock ── encode ──> EncodedBlock ── storage ──> cache_folder/FINGERPRINT
    synthetic ─────────────────────────────────────^                              │ memory-mapped
    Batch <── loader ── order[step * batch : (step + 1) * batch], a share each ───┘

Preparing first, rather than streaming text into training, is what buys exactness: the number of rows is
known, every epoch is an exact shuffle, a position is just (epoch, step), and step ``s`` holds the same
samples however many trainers share them. Text is parsed once, not once an epoch by each trainer.

Begin with ``prepared``, which the master calls, and ``loader``, which every trainer reads.

========= ==============================================================================
module    holds
========= ==============================================================================
inputs    which files there are, and whether they are what they were
layout    which columns a file has, and which of them are wanted
lines     lines of text files, in blocks of bounded size
text      delimited text in blocks of columns, with line numbers
parquet   the same of Parquet
canonical the one text of a categorical value
columns   columns of any type to labels, numbers and categorical values
bad_rows  rows that break a rule: counted, reported, or fatal
sources   all files of a split as ``RawBlock``; CSV, Criteo's TSV, Parquet
synthetic the built-in click log with a planted truth
encode    ``FeatureEncoder``: values to numbers, fitted on the training rows alone
unknown   values that training has not seen, counted
manifest  what is known of a prepared data set, with its checksums
storage   ``PreparedDataset`` on disk: writing it, and gathering a batch from it
building  a folder that is there whole or not at all
checksums of files, sampled or whole
prepared  ``prepare``: a configuration to a prepared data set, made once and shared
order     an exact shuffle with random access
loader    ``BatchLoader``: a trainer's batches, read ahead in the background
========= ==============================================================================
"""
