"""Values to table rows and scaled numbers: vocabularies, hashing and scaling, fitted on the training rows.

Begin with ``feature_encoder``.
"""
