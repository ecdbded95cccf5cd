"""Values to table rows and scaled numbers: vocabularies, hashing and scaling, fitted on the training rows.

``fitting`` collects statistics, ``feature_encoder`` holds the result and encodes blocks.
"""
