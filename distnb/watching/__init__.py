"""Tools to watch a program: live values, files for TensorBoard, and pictures of the placement of values."""
