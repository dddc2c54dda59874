"""The extension points to which detached clusters add."""

from distnb.features import add

add("clusters that stay", "start", "distnb.detached.daemon_client:start")
add("clusters that stay", "connect", "distnb.detached.daemon_client:connect")
add("clusters that stay", "resume", "distnb.detached.reconnection:resume")
add("clusters that stay", "list", "distnb.detached.listing")
add("clusters that stay", "absence", "distnb.detached.staying:Staying")
add("commands", "list", "distnb.detached.listing:LIST")
add("commands", "stop", "distnb.detached.listing:STOP")
