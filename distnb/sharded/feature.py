"""The extension points to which sharded models add."""

from distnb.features import add

add("sharded models", "runtime", "distnb.sharded.sharded_objects:make_runtime")
add("sharded models", "notice", "distnb.sharded.unsharded_steps:noticing")
add("divided objects", "sharded", "distnb.sharded.sharded_objects:SHARDED")
add("shards in Keras", "whole values", "distnb.sharded.keras.whole_models:whole_values")
add("shards in Keras", "fill", "distnb.sharded.parts:fill_part")
add("shards in Keras", "optimizers", "distnb.sharded.keras.optimizer_slots:install")
