"""The extension points at which parameter servers are added to the core."""

from __future__ import annotations

from distnb.features import add

_STRATEGY = "ParameterServerStrategy"

add("strategies", _STRATEGY, "distnb.servers.variables.roles")
add("programs", "distnb.servers.closure_messages", "distnb.servers.engine.task_room:install")
add("stories", "closures", "distnb.servers.coordinator.coordinator:stories")
add("placements", _STRATEGY, "distnb.servers.notebook.placement:placement")
add("models of Keras", _STRATEGY, "distnb.servers.keras.parameter_servers:ModelOnServers")
