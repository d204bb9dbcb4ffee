"""The training program of one rank: trains the model of a plan. Run as `python -m dslaunch.runtime`."""
