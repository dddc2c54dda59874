"""The extension points to which the support of Keras adds."""

from distnb.features import add

add("libraries on replicas", "keras", "distnb.keras.replica_state")
add("device types", "keras", "distnb.keras.device_types")
add("kinds of states", "keras", "distnb.keras.keras_states:KERAS_OBJECTS")
add("adopters of models", "keras.Model", "distnb.keras.models")
add("names of parameters", "keras.Layer", "distnb.keras.parameter_names:same_everywhere")
