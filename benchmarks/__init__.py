"""Predictions held against published runs. Nothing in the package `dslaunch` imports this one."""
