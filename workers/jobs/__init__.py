"""What a master does with a cluster: train, compare, or call a function of the user's own."""
