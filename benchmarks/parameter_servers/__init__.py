"""distnb's parameter servers and coordinator next to TensorFlow's, torch.distributed.rpc and Ray."""
