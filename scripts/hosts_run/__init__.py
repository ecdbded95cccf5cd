"""What several hosts cost, on one machine whose namespaces they are: ``scripts/hosts``."""
