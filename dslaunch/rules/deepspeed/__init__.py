"""Rules about the DeepSpeed JSON: its keys, its sections, and the model and plan that it is for."""
