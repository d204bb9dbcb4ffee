"""Rules about what a shell makes of a script, before any program of a training starts."""
