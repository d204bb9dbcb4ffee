"""Rules about a plan of dslaunch's own: its components, and what it said of itself."""
