"""How pico-tools was made, the bundled model that calls tools."""
