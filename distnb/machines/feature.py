"""Registers engines on other machines."""

from distnb.features import add

add("places of engines", "other machines", "distnb.machines.host_plan:find_place")
add("session parts", "other machines", "distnb.machines.users_code.preparation:Preparation")
add("commands", "worker", "distnb.machines.server_command:WORKER")
