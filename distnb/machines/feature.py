"""Registers engines on other machines."""

from distnb.features import add

add("places of engines", "other machines", "distnb.machines.host_plan:find_place")
add("commands", "worker", "distnb.machines.server_command:WORKER")
