"""Keras models whose torch modules are divided over the replicas of a ShardedStrategy."""
