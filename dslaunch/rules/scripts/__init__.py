"""Rules about training scripts in Python, read as syntax trees and never run."""
