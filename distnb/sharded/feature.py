"""The extension points to which sharded models add."""

from distnb.features import add

add("sharded models", "runtime", "distnb.sharded.sharded_objects:make_runtime")
add("sharded models", "notice", "distnb.sharded.unsharded_steps:noticing")
add("divided objects", "sharded", "distnb.sharded.sharded_objects:SHARDED")
