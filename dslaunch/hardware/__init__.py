"""Where ranks stand on nodes, which links their groups use, and what share of a peak is reached."""
