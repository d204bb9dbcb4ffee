"""Readers of foreign and own files: text in, FileSet out. See fileset.py."""
