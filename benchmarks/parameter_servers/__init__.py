"""distnb's parameter servers and coordinator beside TensorFlow's, torch.distributed.rpc and Ray."""
