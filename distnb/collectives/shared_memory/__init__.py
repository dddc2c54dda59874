"""Memory that the replicas of one machine share, and sums in it."""
