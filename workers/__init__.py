"""The processes of a cluster: master, trainers, workers, and the launcher that supervises them."""
