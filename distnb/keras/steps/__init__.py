"""Steps of a Keras model on several replicas."""
