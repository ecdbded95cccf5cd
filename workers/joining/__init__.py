"""How the roles of a cluster find each other, and learn that one is gone."""
