"""What a program gives its user to watch: values as they come, files for TensorBoard, and where a value's parts are."""
