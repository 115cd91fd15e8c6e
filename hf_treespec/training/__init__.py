"""Training draft heads for a model, on what the model itself writes."""
