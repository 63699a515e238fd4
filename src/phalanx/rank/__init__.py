"""What a process needs to be a rank: its place in the world, devices, ports, and the script's start.

Standard library of Python 3.8 and later: ranks run by the Python of whatever image they are in.
"""
