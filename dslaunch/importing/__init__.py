"""Configurations of others, read into models and recipes: pure text in, text and notes out."""
