"""Components and data of one's own for dslaunch.runtime: see README.md."""
