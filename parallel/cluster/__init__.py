"""A model of the hardware: rates of devices and links, and the time that compute and communication take on them.

Each file imports only earlier ones: hardware, links, realloc_seconds.
"""
