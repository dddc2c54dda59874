"""The training steps of sharded models: passes, FSDP's collectives, and optimizers' steps."""
