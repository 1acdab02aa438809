"""How pico-eye was made: pictures, questions about them, training and evaluation."""
