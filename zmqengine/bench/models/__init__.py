"""Models of random weights, and the facts of a model directory."""
