"""Registers engines on other machines."""

from distnb.features import add

add("options of %distnb start", "other machines", "distnb.machines.start_line")
add("session parts", "other machines", "distnb.machines.users_code.preparation:Preparation")
add("commands", "worker", "distnb.machines.server_command:WORKER")
