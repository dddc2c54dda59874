"""The memory of arrays and tensors, on the heap and in mapped files."""
