"""Starting, watching and ending all roles of a cluster on one machine, and starting them again."""
