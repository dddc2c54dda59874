"""Callbacks of Keras on several replicas: the user's run on replica 0, and two are distnb's own."""
